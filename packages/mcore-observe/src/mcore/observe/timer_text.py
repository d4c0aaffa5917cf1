"""The text that shows timers of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["OPTIONS", "format_times", "longest_times"]

_NAME_WIDTH = 48


def format_times(
    names: Sequence[str], rows: Sequence[Sequence[float]], option: str, normalizer: float = 1.0
) -> str | None:
    """Format the times of all ranks in milliseconds.

    Args:
        names: Names of the timers.
        rows: Seconds, ``rows[rank][i]`` for ``names[i]``; 0 means not timed on that rank.
        option: ``"max"``, ``"minmax"`` or ``"all"`` ranks.
        normalizer: Divides the times; usually the number of iterations they cover.

    Returns:
        The text, or None when no rank timed anything.

    Example:
        >>> print(format_times(["forward"], [[0.001], [0.002]], "max"))
        max time across ranks (ms):
            forward ........................................: 2.00
    """
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
    """Return the longest time over the ranks for each timer that ran.

    Args:
        names: Names of the timers.
        rows: Seconds, as for :func:`format_times`.
        normalizer: Divides the times.

    Returns:
        ``{"<name>-time": seconds}`` in the order of ``names``.

    Example:
        >>> longest_times(["forward", "backward"], [[4.0, 0.0], [6.0, 0.0]], 2)
        {'forward-time': 3.0}
    """
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
