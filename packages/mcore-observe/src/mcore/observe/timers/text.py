"""Texts that show the timers of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NAME_WIDTH = 48


def format_times(
    names: Sequence[str], rows: Sequence[Sequence[float]], option: str, normalizer: float = 1.0
) -> str | None:
    """Format ``rows[rank][i]`` seconds for ``names[i]`` in ms; None when no rank timed anything."""
    header, format_one = OPTIONS[option]
    scale = 1e3 / normalizer
    lines = [
        format_one(name, timed)
        for i, name in enumerate(names)
        if (timed := {rank: row[i] * scale for rank, row in enumerate(rows) if row[i] > 0})
    ]
    return header + "".join(lines) if lines else None


def longest_times(
    names: Sequence[str], rows: Sequence[Sequence[float]], normalizer: float = 1.0
) -> dict[str, float]:
    """Return ``{"<name>-time": seconds}``, the longest over the ranks, for timers that ran."""
    longest = {name: max(row[i] for row in rows) for i, name in enumerate(names)}
    return {f"{name}-time": seconds / normalizer for name, seconds in longest.items() if seconds}


def _max_line(name: str, timed: dict[int, float]) -> str:
    return f"\n    {_dotted(name)}: {max(timed.values()):.2f}"


def _minmax_line(name: str, timed: dict[int, float]) -> str:
    return f"\n    {_dotted(name)}: ({min(timed.values()):.2f}, {max(timed.values()):.2f})"


def _all_lines(name: str, timed: dict[int, float]) -> str:
    ranks = "".join(f"\n     rank {rank:2d}: {ms:.2f}" for rank, ms in timed.items())
    return f"\n  {name}:{ranks}"


def _dotted(name: str) -> str:
    return f"{name} ".ljust(_NAME_WIDTH, ".")


OPTIONS: dict[str, tuple[str, Callable[[str, dict[int, float]], str]]] = {
    "max": ("max time across ranks (ms):", _max_line),
    "minmax": ("(min, max) time across ranks (ms):", _minmax_line),
    "all": ("times across ranks (ms):", _all_lines),
}
