"""The errors of checkpointing, and their texts from the reports of many ranks."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

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


class IntactContentError(CheckpointingException):
    """The content is as it was saved, but this process cannot use it."""


class UnreachableError(OSError):
    """A storage did not respond or refused to, so its content is unknown."""


# A name is missing or belongs to something else. Any other error of the system may pass.
_LASTING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})


def is_lasting(error: OSError) -> bool:
    """Return whether an error shows that a file is missing or not a file."""
    return error.errno in _LASTING


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory, for which torch raises three types."""
    # "can't allocate memory", or for a mapped file "Cannot allocate memory"
    on_cpu = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def find_passing(error: BaseException) -> BaseException | None:
    """Return the cause of an error that is no proof of damage, such as a lack of memory, or None.

    An error of the input that is seen twice must have no cause.
    """
    found: BaseException | None = error
    while found is not None:
        if is_out_of_memory(found) or (isinstance(found, OSError) and not is_lasting(found)):
            return found
        found = found.__cause__
    return None


@contextmanager
def raise_as_damage() -> Iterator[None]:
    """Raise problems of the content as damage. Errors that may pass stay as they are."""
    try:
        yield
    except Exception as error:
        passing = find_passing(error)
        if isinstance(error, IntactContentError) or (
            passing is not None and not isinstance(passing, UnreachableError)
        ):
            raise
        is_content = isinstance(error, CheckpointingException | EOFError) and passing is None
        kind = DamagedCheckpointError if is_content else CheckpointingException
        raise kind(describe_error(error)) from error


@contextmanager
def name_checkpoint(action: str, path: object) -> Iterator[None]:
    """Add the path of the checkpoint to an error. In a load, an error that may pass stays as it is.

    The other ranks raise a CheckpointingException with its text.
    """
    try:
        yield
    except CheckpointingException as error:
        text = f"cannot {action} {path}: {error}"
        passing = find_passing(error) if action == "load" else None
        if passing is None or isinstance(passing, UnreachableError):
            raise type(error)(text) from error
        if hasattr(passing, "add_note"):
            passing.add_note(text)
        raise passing from None


def describe_error(error: BaseException) -> str:
    """Return an exception as text. A CheckpointingException has no type in it."""
    if isinstance(error, CheckpointingException):
        return str(error)
    return f"{type(error).__name__}: {error}"


def merge_reports(reports: Mapping[int, str]) -> str:
    """Join the texts of ranks, equal texts once, each after its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(reports):
        ranks_of.setdefault(reports[rank], []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return "\n".join(shorten(lines))
