"""Command line: ``python -m api_check [--package P ...] [--baseline REF] [--current REF] ...``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from monorepo.workspace import REPOSITORY, WorkspaceError, load_workspace

COULD_NOT_CHECK = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the packages with their last releases; 1: unannounced breaks, 2: not checkable."""
    options = _parser().parse_args(arguments)
    try:
        # Here, so that its absence is an answer and not a traceback.
        importlib.import_module("griffe")
    except ImportError:
        print("griffe is not installed; add it to the environment", file=sys.stderr)
        return COULD_NOT_CHECK
    from api_check.outcome import check_package
    from api_check.output import FORMATS

    try:
        packages = load_workspace(options.root).choose(options.package)
    except WorkspaceError as error:
        print(error, file=sys.stderr)
        return COULD_NOT_CHECK
    outcomes = [
        check_package(
            options.root,
            package,
            baseline=options.baseline,
            current=options.current,
            strict=options.strict,
        )
        for package in packages
    ]
    print(FORMATS[options.format](outcomes, strict=options.strict))
    return max(outcome.status for outcome in outcomes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api_check", description=__doc__)
    parser.add_argument("--package", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--baseline", metavar="REF", help="default: the package's last tag")
    parser.add_argument("--current", metavar="REF", help="default: the working tree")
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    parser.add_argument("--strict", action="store_true", help="fail on overdue removals")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
