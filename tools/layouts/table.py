"""The deviation of each combination from one float64 process, and the page of all."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product

from layouts.cell import Result
from layouts.combinations import AFTER, RANKS, STEPS
from pretrain.settings import Settings
from results import RECORDS
from results.page import markdown_table, read_head

_EXPERT = re.compile(r"\.own\.\d+\.")
_RECORD = "/".join((RECORDS / "layouts").parts[-3:])
_NUM_WORST = 10
_NUMBERS = ("ranks", "layers", "loss", "gradient", "bound", "loads", "seconds")
_GROUP_NUMBERS = ("ranks", "green", "loss", "gradient", "of the bound", "loads", "seconds")
# An fp32 number is rounded by up to 2**-24. The sums of a step have some thousand terms whose
# errors add up like a random walk: sqrt(10_000) * 2**-24 = 6e-6.
_FP32 = 1e-5
# A bf16 number is rounded by up to 2**-9, 0.42 of that in the root mean square. In a layer a value
# is rounded some 12 times, its gradient and that of weights 24 times more, and each once more in
# two sums over tp for each further rank.
_BF16, _FORWARD, _ROUNDINGS, _TP_SUMS = 0.42 * 2.0**-9, 12, 36, 4
# The logits of the second and the third of eight experts are 0.38 of their spread apart on average
# (order statistics of the normal distribution). A relative error ``e`` of each swaps them for
# sqrt(2) * 0.8 * e / 0.38 = 3 e of the tokens. For these tokens one of two experts is another
# expert: half of the output is new, and orthogonal to the output that it replaces.
_SWAPPED = 3.0


@dataclasses.dataclass(frozen=True)
class Reference:
    """One float64 process: losses and gradient norms of all steps, gradients of the first."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, float]


@dataclasses.dataclass
class Row:
    """A combination, its largest relative differences, and the layouts that loaded it."""

    name: str
    ranks: int
    layers: int
    tolerance: float
    when: str
    machine: str
    loss: float = math.nan
    gradient: float = math.nan
    loaded: int = 0
    to_load: int = 0
    seconds: float = 0.0
    ties: int = 0  # tokens that rounding sent to another expert of the same likelihood
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_green(self) -> bool:
        """Whether nothing failed and no difference exceeds the bound."""
        return not self.problems and self.loaded == self.to_load

    @property
    def share(self) -> float:
        """The larger difference over the bound. Infinite if there is none to compare."""
        differences = (self.loss, self.gradient)
        return math.inf if any(map(math.isnan, differences)) else max(differences) / self.tolerance

    def cells(self) -> tuple[str, ...]:
        """The texts of its line of a table."""
        verdict = "ok" if self.is_green else "; ".join(self.problems) or "not all layouts load it"
        return (
            self.name, str(self.ranks), str(self.layers), f"{self.loss:.1e}",
            f"{self.gradient:.1e}", f"{self.tolerance:.0e}", f"{self.loaded}/{self.to_load}",
            f"{self.seconds:.1f}", verdict,
        )  # fmt: skip


def tolerance_of(settings: Settings) -> float:
    """The relative difference to float64 that rounding explains."""
    if not settings.bf16:
        return _FP32
    roundings = settings.num_layers * (_ROUNDINGS + _TP_SUMS * (settings.tp - 1))
    rounded = _BF16 * math.sqrt(roundings)
    if not settings.experts:
        return rounded
    swapped = _SWAPPED * _BF16 * math.sqrt(settings.num_layers * _FORWARD)
    return rounded + math.sqrt(swapped / 2)


def compare_steps(
    row: Row, result: Result, reference: Reference, *, experts_together: bool = False
) -> None:
    """Compare the steps of a combination with the reference.

    In bf16 some tokens reach other experts, some of which have few tokens: the gradients of all
    experts of a layer are compared together.
    """
    row.seconds += result.seconds
    if result.error:
        row.problems.append(result.error)
        return
    row.loss = _find_largest(result.losses, reference.losses[:-AFTER])
    norms = _find_largest(result.norms, reference.norms[:-AFTER])
    if result.gradients.keys() != reference.gradients.keys():
        row.problems.append(f"gradients of {sorted(result.gradients)}")
        return
    found, expected = result.gradients, reference.gradients
    if experts_together:
        found, expected = _join_experts(found), _join_experts(expected)
    each = _find_largest([found[name] for name in expected], list(expected.values()))
    row.gradient = max(norms, each)
    if not max(row.loss, row.gradient) <= row.tolerance:
        row.problems.append(f"differs by more than {row.tolerance:.2g}")


def compare_load(row: Row, result: Result, reference: Reference, layout: str) -> None:
    """Compare the steps after a checkpoint, in another layout, with the reference."""
    row.seconds += result.seconds
    if result.error:
        row.problems.append(f"as {layout}: {result.error}")
        return
    difference = max(
        _find_largest(result.losses, reference.losses[-AFTER:]),
        _find_largest(result.norms, reference.norms[-AFTER:]),
    )
    if difference <= row.tolerance:
        row.loaded += 1
    else:
        row.problems.append(f"as {layout}: continues {difference:.1e} off")


def page(rows: Sequence[Row], count: int) -> str:
    """The page of the rows that have been run, out of ``count``."""
    red = [row for row in rows if not row.is_green]
    status = f"{len(rows)} of {count} combinations have been run, {len(rows) - len(red)} are green."
    if rows:
        machines = " and on ".join(sorted({row.machine for row in rows}))
        dates = sorted(row.when for row in rows)
        status += f" They were run from {dates[0]} to {dates[-1]} on {machines}."
    columns = ("ranks", "precision", "experts", *_GROUP_NUMBERS[1:])
    head = read_head(__file__, STEPS=STEPS, RECORD=_RECORD)
    parts = [head, f"{status}\n", markdown_table(columns, _summarize(rows), right=_GROUP_NUMBERS)]
    worst = sorted(rows, key=lambda row: row.share, reverse=True)[:_NUM_WORST]
    # Failures are all listed, however many there are.
    for title, listed in (("Nearest to the bound", worst), ("Failures", red)):
        if listed:
            cells = (row.cells() for row in listed)
            table = markdown_table(("combination", *_NUMBERS, ""), cells, right=_NUMBERS)
            parts.append(f"\n## {title}\n\n{table}")
    return "\n".join(parts) + "\n"


def _summarize(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """One line for each number of ranks with and without bf16 and experts: the worst of each."""
    for ranks, bf16, experts in product(RANKS, (False, True), (False, True)):
        group = [
            row
            for row in rows
            if (row.ranks, " bf16" in row.name, " ep" in row.name) == (ranks, bf16, experts)
        ]
        if group:
            yield (
                str(ranks),
                "bf16" if bf16 else "fp32",
                "yes" if experts else "",
                f"{sum(row.is_green for row in group)}/{len(group)}",
                f"{max(row.loss for row in group):.1e}",
                f"{max(row.gradient for row in group):.1e}",
                f"{max(row.share for row in group):.0%}",
                f"{sum(row.loaded for row in group)}/{sum(row.to_load for row in group)}",
                f"{sum(row.seconds for row in group):.0f}",
            )


def _join_experts(gradients: dict[str, float]) -> dict[str, float]:
    """The norms of gradients, with all experts of a layer as one."""
    squares: dict[str, float] = {}
    for name, norm in gradients.items():
        joined = _EXPERT.sub(".own.", name)
        squares[joined] = squares.get(joined, 0.0) + norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}


def _find_largest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference. Infinite if a number is missing or NaN."""
    if len(found) != len(expected):
        return math.inf
    differences = [
        abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences)
