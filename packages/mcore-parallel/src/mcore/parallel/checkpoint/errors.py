"""The errors of checkpointing, and their texts from the reports of many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mcore.parallel.shortened import ranks_text, shorten


class CheckpointingException(Exception):  # noqa: N818 - the name Megatron-LM users catch
    """A sharded state dict, a save or a load is invalid. The text names the key or file.

    In distributed calls every rank of the group raises it, whichever rank found the problem.

    Example:
        >>> try:
        ...     raise CheckpointingException("key 'w': dtype differs")
        ... except CheckpointingException as error:
        ...     print(error)
        key 'w': dtype differs
    """


class DamagedCheckpointError(CheckpointingException):
    """A checkpoint is missing, incomplete or has changed, whatever state dict it is loaded into.

    Example:
        >>> issubclass(DamagedCheckpointError, CheckpointingException)
        True
    """


def describe_error(error: BaseException) -> str:
    """Return an exception as text. A CheckpointingException has no type in it."""
    if isinstance(error, CheckpointingException):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def name_place(action: str, path: object) -> Iterator[None]:
    """Add the path of the checkpoint to an error, whose type is the same on all ranks."""
    try:
        yield
    except CheckpointingException as error:
        raise type(error)(f"cannot {action} {path}: {error}") from error


def merge_reports(reports: Mapping[int, str]) -> str:
    """Join the texts of ranks, equal texts once, each after its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(reports):
        ranks_of.setdefault(reports[rank], []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return "\n".join(shorten(lines))
