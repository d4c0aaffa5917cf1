"""The table of all combinations: how far each is from one float64 process, and what fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from layouts.cell import Result
from layouts.combinations import STEPS
from pretrain.settings import Settings

# An fp32 number is rounded by up to 2**-24; the sums of a step have some thousand terms whose
# errors add up like a random walk, sqrt(10_000) * 2**-24 = 6e-6.
_FP32 = 1e-5
# A bf16 number is rounded by up to 2**-9. On its way through the layers and back a value is rounded
# some 144 times, and once more in each of 16 sums over tp for each further rank. AdamW divides by
# the gradients' own size, so that later steps differ by as much again.
_BF16, _ROUNDINGS, _TP_SUMS = 2.0**-9, 144, 16


@dataclasses.dataclass(frozen=True)
class Reference:
    """One float64 process: losses and gradient norms of all steps, gradients of the first."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, float]


@dataclasses.dataclass
class Row:
    """A combination, its largest relative differences, and how many layouts went on from it."""

    name: str
    ranks: int
    tolerance: float
    loss: float = math.nan
    gradient: float = math.nan
    loaded: int = 0
    to_load: int = 0
    seconds: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_green(self) -> bool:
        """Whether nothing failed and nothing differs by more than rounding explains."""
        return not self.problems and self.loaded == self.to_load


def tolerance_of(settings: Settings) -> float:
    """How far numbers of a combination may be from those of float64, relatively."""
    if not settings.bf16:
        return _FP32
    return 2 * _BF16 * math.sqrt(_ROUNDINGS + _TP_SUMS * (settings.tp - 1))


def take_steps(row: Row, result: Result, reference: Reference) -> None:
    """Compare the steps of a combination with the reference."""
    row.seconds += result.seconds
    if result.error:
        row.problems.append(result.error)
        return
    row.loss = _largest(result.losses, reference.losses[:STEPS])
    norms = _largest(result.norms, reference.norms[:STEPS])
    if result.gradients.keys() != reference.gradients.keys():
        row.problems.append(f"gradients of {sorted(result.gradients)}")
        return
    names = sorted(reference.gradients)
    each = _largest(
        [result.gradients[name] for name in names], [reference.gradients[name] for name in names]
    )
    row.gradient = max(norms, each)
    if not max(row.loss, row.gradient) <= row.tolerance:
        row.problems.append(f"differs by more than {row.tolerance:.2g}")


def take_load(row: Row, result: Result, reference: Reference, layout: str) -> None:
    """Compare the steps behind a checkpoint, in another layout, with the reference."""
    row.seconds += result.seconds
    if result.error:
        row.problems.append(f"as {layout}: {result.error}")
        return
    behind = slice(STEPS, STEPS + len(result.losses))
    far = max(
        _largest(result.losses, reference.losses[behind]),
        _largest(result.norms, reference.norms[behind]),
    )
    if far <= row.tolerance:
        row.loaded += 1
    else:
        row.problems.append(f"as {layout}: goes on {far:.1e} off")


def markdown(rows: Iterable[Row]) -> list[str]:
    """The lines of the table."""
    lines = [
        "| combination | ranks | loss | gradient | loads | seconds | |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        said = "ok" if row.is_green else "; ".join(row.problems) or "not all layouts load it"
        lines.append(
            f"| {row.name} | {row.ranks} | {row.loss:.1e} | {row.gradient:.1e} | "
            f"{row.loaded}/{row.to_load} | {row.seconds:.1f} | {said} |"
        )
    return lines


def _largest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where a number is missing or is none."""
    if len(found) != len(expected):
        return math.inf
    far = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    return math.inf if any(math.isnan(one) for one in far) else max(far)
