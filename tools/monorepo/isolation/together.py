"""Command line: ``python -m monorepo.isolation.together [PYTEST ARGUMENT ...]``.

Installs all packages from their wheels into one environment, imports every module, and runs the
main job's tests there, outside the repository.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from monorepo.hatch_settings import list_dev_dependencies
from monorepo.isolation.checks import check_imports
from monorepo.isolation.venv import CleanVenv, IsolationError, build_wheels, make_venv
from monorepo.workspace import REPOSITORY, Workspace, load_workspace

_TESTS = "tests-integration"
# They need the installed packages and the tools, not the packages' sources.
_CHOSEN = ("pretrain_*.py", "test_pretrain_*.py")
_IGNORED = shutil.ignore_patterns("tests", "__pycache__", ".*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the packages' wheels together."""
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.isolation.together",
        description="Test the wheels of all packages in one environment.",
        epilog="All other arguments are passed to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--python", default=sys.executable, help="default: this interpreter")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options, chosen = parser.parse_known_args(arguments)
    workspace = load_workspace(options.root)
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        scratch = Path(folder).resolve()
        try:
            venv = _install_all(workspace, scratch, options.python)
            for package in workspace.distributions.values():
                check_imports(package, venv)
        except IsolationError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{', '.join(workspace.names)} import from one environment", flush=True)
        outside = scratch / "outside"
        shutil.copytree(workspace.root / "tools", outside / "tools", ignore=_IGNORED)
        (outside / _TESTS).mkdir()
        for pattern in _CHOSEN:
            for file in (workspace.root / _TESTS).glob(pattern):
                shutil.copy(file, outside / _TESTS)
        shutil.copy(workspace.root / "pyproject.toml", outside)
        return int(venv.run_tests(outside, _TESTS, *chosen) != 0)


def _install_all(workspace: Workspace, scratch: Path, python: str) -> CleanVenv:
    """Install every package from its wheel, with the dependencies of the environment ``dev``."""
    wheels = build_wheels(workspace.distributions.values(), scratch / "wheels")
    located = [f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
    venv = make_venv(scratch / "venv", python, located)
    # Runs of a second leave MLflow too little time to compile its modules next to them.
    venv.install("--compile-bytecode", *located, *list_dev_dependencies(workspace.root))
    return venv


if __name__ == "__main__":
    sys.exit(main())
