"""Command line: ``python -m api_check [--package P ...] [--baseline REF] ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome, check_package
from monorepo.workspace import REPOSITORY, WorkspaceError, load_workspace

_VERDICTS = {PASSED: "ok", COULD_NOT_CHECK: "could not check"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the packages with their last releases. Returns 1 for unannounced breaks.

    Returns 2 if a package cannot be checked.
    """
    parser = argparse.ArgumentParser(prog="python -m api_check", description=__doc__)
    parser.add_argument("--package", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--baseline", metavar="REF", help="default: the package's last tag")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="text")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        packages = load_workspace(options.root).choose(options.package)
    except WorkspaceError as error:
        print(error, file=sys.stderr)
        return COULD_NOT_CHECK
    outcomes = [
        check_package(options.root, package, baseline=options.baseline) for package in packages
    ]
    print("\n".join(_FORMATS[options.format](outcomes)))
    return max(outcome.status for outcome in outcomes)


def _format_text(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield f"{outcome.package}: {_VERDICTS.get(outcome.status, 'FAILED')}: {outcome.notice}"
        for one in outcome.findings:
            verdict = "FAIL" if one.fails else "covered" if one.covered else "note"
            place = f"{one.file}:{one.line}" if one.line else one.file
            yield f"  {verdict:7} {one} [{place}]"


def _format_github(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Workflow commands that GitHub shows at the lines of a change."""
    for outcome in outcomes:
        level = "error" if outcome.status else "notice"
        yield f"::{level}::{_escape(f'{outcome.package}: {outcome.notice}')}"
        for one in outcome.findings:
            fails = one.fails
            level = "error" if fails else "notice" if one.covered else "warning"
            place = f" file={one.file},line={max(one.line, 1)},title={one.kind}"
            yield f"::{level}{place}::{_escape(f'{one.path}: {one.change}')}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


_FORMATS: Mapping[str, Callable[[Sequence[Outcome]], Iterator[str]]] = {
    "text": _format_text,
    "github": _format_github,
}


if __name__ == "__main__":
    sys.exit(main())
