"""Command line: ``python -m monorepo.isolation.together [PYTEST ARGUMENT ...]``.

Installs all packages from their wheels into one environment, imports every module, and runs the
main job's tests there, outside the repository.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from monorepo.hatch_settings import dev_dependencies
from monorepo.isolation.checks import IsolationError, check_imports
from monorepo.isolation.venv import CleanVenv, InstallError, clean_environment, make_venv
from monorepo.isolation.wheels import BuildError, build_wheels
from monorepo.workspace import REPOSITORY, Workspace, load_workspace

_TESTS = "tests-integration"
# Those that need the installed packages and the tools, not the packages' sources.
_CHOSEN = ("pretrain_*.py", "test_pretrain_*.py")
_IGNORED = shutil.ignore_patterns("tests", "__pycache__", ".*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the packages' wheels together."""
    options, chosen = _parser().parse_known_args(arguments)
    workspace = load_workspace(options.root)
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        scratch = Path(folder).resolve()
        try:
            venv = install_all(workspace, scratch, options.python)
            for package in workspace.distributions.values():
                check_imports(package, venv)
        except (BuildError, InstallError, IsolationError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{', '.join(workspace.names)} import from one environment", flush=True)
        status = run_main_job_tests(workspace, venv, scratch / "outside", chosen)
    return 1 if status else 0


def install_all(workspace: Workspace, scratch: Path, python: str) -> CleanVenv:
    """Install every package from its wheel, and what the environment ``dev`` has besides."""
    wheels = build_wheels(workspace.distributions.values(), scratch / "wheels")
    located = [f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()]
    venv = make_venv(scratch / "venv", python, located)
    # Runs of a second leave MLflow too little time to be compiled beside them.
    venv.install([*located, *dev_dependencies(workspace.root)], compiled=True)
    return venv


def run_main_job_tests(
    workspace: Workspace, venv: CleanVenv, outside: Path, arguments: Sequence[str]
) -> int:
    """Run the main job's tests where no source of a package can be imported."""
    shutil.copytree(workspace.root / "tools", outside / "tools", ignore=_IGNORED)
    (outside / _TESTS).mkdir()
    for pattern in _CHOSEN:
        for file in (workspace.root / _TESTS).glob(pattern):
            shutil.copy(file, outside / _TESTS)
    shutil.copy(workspace.root / "pyproject.toml", outside)
    command = [str(venv.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", _TESTS]
    done = subprocess.run([*command, *arguments], cwd=outside, env=clean_environment(), check=False)
    return done.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m monorepo.isolation.together",
        description="Test the wheels of all packages in one environment.",
        epilog="Everything else goes to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--python", default=sys.executable, help="by default this one")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
