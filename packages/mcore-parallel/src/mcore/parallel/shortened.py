"""Shortened lists for errors and log lines."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_LISTED = 20


def shorten(
    items: Sequence[object], most: int = _MAX_LISTED, more: str = "... and {} more"
) -> list[str]:
    """Return at most ``most`` items as text, then the number of the other items."""
    texts = [str(item) for item in items[:most]]
    return [*texts, more.format(len(items) - most)] if len(items) > most else texts


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def titled_list(title: str, items: Sequence[object], noun: str = "problem") -> str:
    """Return a title with the number of items, and the items below it, shortened."""
    head = f"{title} ({counted(len(items), noun)}):"
    return "\n".join([head, *shorten([f"  - {item}" for item in items], more="  ... and {} more")])


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, with neighbours as a range: ``rank 3``, ``ranks 0-2, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shorten(texts, more='...'))}"
