"""Command line: ``python -m monorepo.isolation [PACKAGE ...] [--lowest] | --together ...``.

Builds the packages, installs each alone into a clean environment and runs its tests there, outside
the repository. With ``--together`` it installs all into one and runs the main job's tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from monorepo.isolation.run import IsolationRun, collect_needed, run_together
from monorepo.isolation.venv import IsolationError, build_wheels
from monorepo.workspace import REPOSITORY, WorkspaceError, load_workspace, read_torch_pin


def main(arguments: Sequence[str] | None = None) -> int:
    """Test packages alone and print the results. Returns 2 for a wrong name, 1 for a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.isolation", description="Test each package installed alone."
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all")
    parser.add_argument(
        "--lowest", action="store_true", help="use the lowest versions that the requirements allow"
    )
    parser.add_argument("--torch", metavar="VERSION", help="default: the version in hatch.toml")
    parser.add_argument(
        "--python", default=sys.executable, help="path or version; default: this interpreter"
    )
    parser.add_argument(
        "--together",
        nargs=argparse.REMAINDER,
        metavar="PYTEST-ARGUMENT",
        help="test all packages in one environment, with these arguments for pytest",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        workspace = load_workspace(options.root)
        targets = workspace.choose(options.packages)
    except WorkspaceError as error:
        print(error, file=sys.stderr)
        return 2
    torch = options.torch or read_torch_pin(workspace.root)
    outcomes: dict[str, str] = {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="isolated-") as folder:
        scratch = Path(folder).resolve()
        scratch.chmod(0o755)  # some tests continue as another user
        try:
            wheels = build_wheels(collect_needed(workspace, targets), scratch / "wheels")
            if options.together is not None:
                tested = (workspace, wheels, scratch, options.python, options.together)
                return int(run_together(*tested) != 0)
        except IsolationError as error:
            print(error, file=sys.stderr)
            return 1
        run = IsolationRun(workspace, wheels, scratch, options.python, torch, options.lowest)
        for name in targets:
            print(f"\n{name}", flush=True)
            try:
                outcomes[name] = run.check(name)
            except IsolationError as error:
                print(error, file=sys.stderr, flush=True)
                outcomes[name] = f"FAILED: {str(error).splitlines()[0]}"
                failed = True
    print("", *(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
