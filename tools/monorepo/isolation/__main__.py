"""Command line: ``python -m monorepo.isolation [PACKAGE ...] [--lowest]``.

Builds the packages, installs each one alone into a clean environment and runs its tests there,
outside the repository.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from monorepo.hatch_settings import torch_pin
from monorepo.isolation.checks import IsolationError
from monorepo.isolation.run import IsolationRun
from monorepo.isolation.venv import InstallError
from monorepo.isolation.wheels import BuildError, build_wheels
from monorepo.workspace import REPOSITORY, Distribution, Workspace, WorkspaceError, load_workspace

_FAILED = "FAILED"


def main(arguments: Sequence[str] | None = None) -> int:
    """Test packages in isolation and print how each fared; 2 for a wrong name, 1 for a failure."""
    options = _parser().parse_args(arguments)
    try:
        workspace = load_workspace(options.root)
        targets = workspace.chosen(options.packages)
    except WorkspaceError as error:
        print(error, file=sys.stderr)
        return 2
    torch = options.torch or torch_pin(workspace.root)
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="isolated-") as folder:
        scratch = Path(folder).resolve()
        scratch.chmod(0o755)  # some tests continue as another user
        try:
            wheels = build_wheels(needed(workspace, targets), scratch / "wheels")
        except BuildError as error:
            print(error, file=sys.stderr)
            return 1
        run = IsolationRun(workspace, wheels, scratch, options.python, torch, options.lowest)
        for name in targets:
            print(f"\n{name}", flush=True)
            outcomes[name] = _outcome(run, name)
    print("", *(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(any(outcome.startswith(_FAILED) for outcome in outcomes.values()))


def needed(workspace: Workspace, targets: Iterable[str]) -> list[Distribution]:
    """The targets and what they need."""
    names = {other for name in targets for other in (name, *workspace.closure(name))}
    return [workspace[name] for name in workspace.ordered(names)]


def _outcome(run: IsolationRun, name: str) -> str:
    try:
        return run.check(name)
    except (InstallError, IsolationError) as error:
        print(error, file=sys.stderr, flush=True)
        return f"{_FAILED}: {str(error).splitlines()[0]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.isolation", description="Test each package installed alone."
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="by default all")
    parser.add_argument(
        "--lowest", action="store_true", help="at the lowest versions that its requirements allow"
    )
    parser.add_argument("--torch", metavar="VERSION", help="by default that of hatch.toml")
    parser.add_argument(
        "--python", default=sys.executable, help="a path or a version; by default this one"
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
