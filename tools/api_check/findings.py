"""Findings of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Weight(str, Enum):
    """The effect of a finding on the outcome.

    ``WARNING`` is only shown. ``BREAKAGE`` fails unless the version announces it.
    ``BROKEN_PROMISE`` always fails.
    """

    WARNING = "warning"
    BREAKAGE = "breakage"
    BROKEN_PROMISE = "broken promise"


@dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        package: The distribution.
        kind: In capitals, such as ``PARAMETER_REMOVED``.
        path: The public path, as users import it.
        old: The old text.
        new: The new text.
        file: The file, relative to the repository.
        line: The line in it, from 1, or 0 if there is none.
        weight: The effect on the outcome.
        covered: Whether the version of the package announces it.
    """

    package: str
    kind: str
    path: str
    old: str
    new: str
    file: str
    line: int
    weight: Weight
    covered: bool = False

    def __str__(self) -> str:
        """The kind, the path and the change, in a line."""
        return f"{self.kind} {self.path}: {self.change}"

    @property
    def change(self) -> str:
        """The old and the new text."""
        return f"{self.old or '(nothing)'} -> {self.new or '(nothing)'}"

    @property
    def fails(self) -> bool:
        """Whether the check fails because of it."""
        return self.weight is not Weight.WARNING and not self.covered


def cover(findings: Iterable[Finding]) -> list[Finding]:
    """The findings for a version that announces breakages."""
    return [
        replace(one, covered=True) if one.weight is Weight.BREAKAGE else one for one in findings
    ]
