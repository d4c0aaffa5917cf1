"""The one error that checkpointing raises, and how reports of many ranks become its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointingException",
    "bounded_list",
    "describe_error",
    "merge_reports",
    "ranks_text",
]

_MAX_LISTED = 20


class CheckpointingException(Exception):  # noqa: N818 - the name Megatron-LM users catch
    """A sharded state dict, a save or a load is not right; the text says which key or file.

    In distributed calls every rank of the group raises it, whichever rank found the problem.

    Example:
        >>> try:
        ...     raise CheckpointingException("key 'w': dtype differs")
        ... except CheckpointingException as error:
        ...     print(error)
        key 'w': dtype differs
    """


def bounded_list(title: str, items: Sequence[str], noun: str = "problem") -> str:
    """Write a title and at most 20 items, one a line, and how many more there are."""
    lines = [f"{title} ({len(items)} {noun}{'s' if len(items) != 1 else ''}):"]
    lines += [f"  - {item}" for item in items[:_MAX_LISTED]]
    if len(items) > _MAX_LISTED:
        lines.append(f"  ... and {len(items) - _MAX_LISTED} more")
    return "\n".join(lines)


def describe_error(error: BaseException) -> str:
    """Write an exception as text; one of ours without its type."""
    if isinstance(error, CheckpointingException):
        return str(error)
    return f"{type(error).__name__}: {error}"


def merge_reports(reports: Mapping[int, str]) -> str:
    """Join the texts of ranks, equal ones once, each after the ranks it came from."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(reports):
        ranks_of.setdefault(reports[rank], []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"... and {len(lines) - _MAX_LISTED} more"]
    return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """Write sorted ranks as ``rank 3`` or ``ranks 0-2, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:_MAX_LISTED])
    more = ", ..." if len(runs) > _MAX_LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
