"""Command line: `python -m versions_matrix [VERSION ...] [--require-all]`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from monorepo.hatch_settings import matrix_cells
from monorepo.workspace import REPOSITORY, Distribution, load_workspace
from versions_matrix.environments import clean_environment, find_uv, make_environment
from versions_matrix.interpreters import find_interpreters
from versions_matrix.selection import left_out

PACKAGE = "mcore-versioning"
EXIT_OK, EXIT_FAILED, EXIT_NOTHING_RAN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests on each version and print what came of it.

    Args:
        arguments: The command line without the program's name; by default that of the process.

    Returns:
        0 when all versions that were found pass, 1 when one fails (or, on request, is missing),
        2 when none was found.
    """
    package = load_workspace(REPOSITORY)[PACKAGE]
    versions = pythons(package, REPOSITORY)
    options = _parser(versions).parse_args(arguments)
    interpreters = find_interpreters(options.versions or versions, os.environ)
    skipped = left_out(package.folder / "tests", provided(package))
    for file, modules in skipped.items():
        print(f"left out: {file}, which needs {', '.join(modules)}")
    results = {
        version: _run(package, version, path, skipped) for version, path in interpreters.items()
    }
    print("\n" + "\n".join(f"Python {version}: {result}" for version, result in results.items()))
    return exit_code(results, require_all=options.require_all)


def pythons(package: Distribution, root: Path) -> tuple[str, ...]:
    """The versions of Python in the test matrix that a package supports, oldest first."""
    found = dict.fromkeys(cell.python for cell in matrix_cells(root))
    return tuple(python for python in found if package.requires_python.contains(python))


def provided(package: Distribution) -> set[str]:
    """Modules that tests can import beside a package: what it needs, and what its tests need."""
    needed = (*package.dependencies, *package.test_dependencies)
    return {package.module.partition(".")[0], *(one.name.replace("-", "_") for one in needed)}


def exit_code(results: Mapping[str, str], *, require_all: bool) -> int:
    """The worst that happened: a failure, nothing found at all, or something missing."""
    outcomes = set(results.values())
    if outcomes - {"passed", "not found"}:
        return EXIT_FAILED
    if outcomes <= {"not found"}:
        return EXIT_NOTHING_RAN
    return EXIT_FAILED if require_all and "not found" in outcomes else EXIT_OK


def _parser(versions: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m versions_matrix", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(versions))
    parser.add_argument(
        "--require-all", action="store_true", help="fail where an interpreter is not found"
    )
    return parser


def _run(
    package: Distribution,
    version: str,
    interpreter: Path | None,
    skipped: Mapping[str, list[str]],
) -> str:
    if interpreter is None:
        return "not found"
    print(f"\nPython {version}: {interpreter}", flush=True)
    with tempfile.TemporaryDirectory(prefix="versions-matrix-") as folder:
        try:
            python = make_environment(
                Path(folder) / "venv",
                interpreter,
                [str(package.folder), *map(str, package.test_dependencies)],
                find_uv(),
            )
        except subprocess.CalledProcessError as error:
            return f"could not be set up: exit status {error.returncode} of {error.cmd[0]}"
        tests = package.folder / "tests"
        ignored = [f"--ignore={tests / file}" for file in skipped]
        pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        finished = subprocess.run(
            [*pytest, str(tests), *ignored],
            cwd=REPOSITORY,
            env=clean_environment(),
            check=False,
        )
    return "passed" if finished.returncode == 0 else f"failed with status {finished.returncode}"


if __name__ == "__main__":
    sys.exit(main())
