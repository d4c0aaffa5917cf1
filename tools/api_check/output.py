"""Outcomes as text, as JSON, and as annotations of a GitHub job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from api_check.findings import Finding
from api_check.outcome import COULD_NOT_CHECK, PASSED, Outcome

_WORDS = {PASSED: "ok", COULD_NOT_CHECK: "could not check"}


def as_text(outcomes: Sequence[Outcome], *, strict: bool) -> str:
    """A line per package and one per finding below it."""
    lines: list[str] = []
    for outcome in outcomes:
        lines.append(f"{outcome.package}: {_WORDS.get(outcome.status, 'FAILED')}: {outcome.notice}")
        lines.extend(_line(one, strict=strict) for one in outcome.findings)
    return "\n".join(lines)


def as_json(outcomes: Sequence[Outcome], *, strict: bool) -> str:
    """One object with everything."""
    packages = [
        {
            "package": outcome.package,
            "status": outcome.status,
            "notice": outcome.notice,
            "findings": [
                {**one.as_dict(), "fails": one.fails(strict=strict)} for one in outcome.findings
            ],
        }
        for outcome in outcomes
    ]
    return json.dumps({"strict": strict, "packages": packages}, indent=2)


def as_github(outcomes: Sequence[Outcome], *, strict: bool) -> str:
    """Workflow commands that GitHub shows at the lines of a change."""
    return "\n".join(line for outcome in outcomes for line in _commands(outcome, strict=strict))


FORMATS: Mapping[str, Callable[..., str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
}


def _line(one: Finding, *, strict: bool) -> str:
    verdict = "FAIL" if one.fails(strict=strict) else "covered" if one.covered else "note"
    place = f"{one.file}:{one.line}" if one.line else one.file
    return f"  {verdict:7} {one} [{place}]"


def _commands(outcome: Outcome, *, strict: bool) -> Iterable[str]:
    level = "error" if outcome.status else "notice"
    yield f"::{level}::{_escaped(f'{outcome.package}: {outcome.notice}')}"
    for one in outcome.findings:
        fails = one.fails(strict=strict)
        level = "error" if fails else "notice" if one.covered else "warning"
        where = f" file={one.file},line={max(one.line, 1)},title={one.kind}"
        yield f"::{level}{where}::{_escaped(f'{one.path}: {one.change}')}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
