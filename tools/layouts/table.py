"""The table of all combinations: how far each is from one float64 process, and what fails."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from bench.table import markdown_table
from layouts.cell import Result
from layouts.combinations import STEPS
from pretrain.settings import Settings

_EXPERT = re.compile(r"\.own\.\d+\.")
_HEAD = f"""# Every layout of the main job

`hatch run parity` trains {STEPS} steps of a tiny model in every layout of tp, cp, pp, vpp, dp,
fsdp, hsdp and ep, with eight experts or without, on 1, 2, 4 and 8 ranks. It compares each step's
loss, each step's gradient norm and the norm of every parameter's first gradient with the same model
in plain PyTorch, in float64 on one process. The checkpoint of each is then loaded in four other
layouts, one on 1, 2, 4 and 8 ranks where there is one, and two more steps are compared.

On 1 and 2 ranks each layout comes with every set of sp, recompute, packed and bf16. On 4 and 8 it
comes with one, chosen so that any two values of two dimensions meet (`--all` runs every set). There
is a layer for each stage, and two without a pipeline.

The columns give the largest relative differences and how much rounding explains: 1e-5 in fp32, in
bf16 what `tools/layouts/table.py` derives. `seconds` is for the {STEPS} steps, the checkpoint and
its loads. What is left of this table is run, and the table written again, by

`hatch run parity --resume --results tools/docs/layouts.jsonl --output tools/docs/layouts.md`

What it has found, both mended: with bf16, torch's layer norm adds up its gradients on a CPU in bf16
(7.7e-2 off here without sp, 79 % of a bias gradient lost over 16,384 tokens), whatever the layout;
and a layout named with `--resume` kept `--vpp`, `--ep` and `--hsdp-outer` of the stored one.
"""
_NUMBERS = ("ranks", "layers", "loss", "gradient", "bound", "loads", "seconds")
# An fp32 number is rounded by up to 2**-24; the sums of a step have some thousand terms whose
# errors add up like a random walk, sqrt(10_000) * 2**-24 = 6e-6.
_FP32 = 1e-5
# A bf16 number is rounded by up to 2**-9, 0.42 of that in the root mean square. On its way through
# a layer a value is rounded some 12 times, its gradient and that of weights 24 times more, and each
# once more in two sums over tp for each further rank.
_BF16, _FORWARD, _ROUNDINGS, _TP_SUMS = 0.42 * 2.0**-9, 12, 36, 4
# The logits of the second and the third of eight experts are 0.38 of their spread apart on average
# (order statistics of the normal distribution), so that an error of so small a part ``e`` of each
# swaps them for sqrt(2) * 0.8 * e / 0.38 = 3 e of the tokens. For these, one of two experts is
# another one: half of the change is new, which has no direction in common with what it replaces.
_SWAPPED = 3.0


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
    layers: int
    tolerance: float
    when: str
    machine: str
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

    def cells(self) -> tuple[str, ...]:
        """The texts of its line of the table."""
        said = "ok" if self.is_green else "; ".join(self.problems) or "not all layouts load it"
        return (
            self.name, str(self.ranks), str(self.layers), f"{self.loss:.1e}",
            f"{self.gradient:.1e}", f"{self.tolerance:.0e}", f"{self.loaded}/{self.to_load}",
            f"{self.seconds:.1f}", said,
        )  # fmt: skip


def tolerance_of(settings: Settings) -> float:
    """How far numbers of a combination may be from those of float64, relatively."""
    if not settings.bf16:
        return _FP32
    roundings = settings.num_layers * (_ROUNDINGS + _TP_SUMS * (settings.tp - 1))
    rounded = _BF16 * math.sqrt(roundings)
    if not settings.experts:
        return rounded
    swapped = _SWAPPED * _BF16 * math.sqrt(settings.num_layers * _FORWARD)
    return rounded + math.sqrt(swapped / 2)


def take_steps(
    row: Row, result: Result, reference: Reference, *, experts_together: bool = False
) -> None:
    """Compare the steps of a combination with the reference.

    In bf16 some tokens go to other experts, of which some have few tokens: the gradients of all
    experts of a layer are compared together.
    """
    row.seconds += result.seconds
    if result.error:
        row.problems.append(result.error)
        return
    row.loss = _largest(result.losses, reference.losses[:STEPS])
    norms = _largest(result.norms, reference.norms[:STEPS])
    if result.gradients.keys() != reference.gradients.keys():
        row.problems.append(f"gradients of {sorted(result.gradients)}")
        return
    found, expected = result.gradients, reference.gradients
    if experts_together:
        found, expected = _by_layer(found), _by_layer(expected)
    each = _largest([found[name] for name in expected], list(expected.values()))
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


def page(rows: Sequence[Row], count: int) -> str:
    """The page of rows that have been run of a table of so many."""
    red = sum(not row.is_green for row in rows)
    told = f"{len(rows)} of {count} combinations have been run, {len(rows) - red} of them green"
    machines = sorted({row.machine for row in rows})
    dates = sorted(row.when for row in rows)
    if rows:
        told += f", from {dates[0]} to {dates[-1]} on {' and on '.join(machines)}"
    lines = (row.cells() for row in rows)
    table = markdown_table(("combination", *_NUMBERS, ""), lines, right=_NUMBERS)
    return "\n".join([_HEAD, f"{told}.", "", table])


def _by_layer(gradients: dict[str, float]) -> dict[str, float]:
    """The norms of gradients, of all experts of a layer together."""
    squares: dict[str, float] = {}
    for name, norm in gradients.items():
        joined = _EXPERT.sub(".own.", name)
        squares[joined] = squares.get(joined, 0.0) + norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}


def _largest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where a number is missing or is none."""
    if len(found) != len(expected):
        return math.inf
    far = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    return math.inf if any(math.isnan(one) for one in far) else max(far)
