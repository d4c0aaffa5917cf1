"""Maxima over a group that also carry the errors of single ranks, so that all ranks raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore.parallel.groups import comm_device

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["max_or_raise"]

_TEXT_BYTES = 2048
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RuntimeError, TypeError, ValueError)
}


def max_or_raise(
    numbers: Sequence[int], error: Exception | None, group: dist.ProcessGroup
) -> list[int]:
    """Return the largest of all ranks' numbers, place by place, unless a rank has an error.

    One all-reduce (MAX of int64, one more than the numbers) over ``group``; every rank of it calls
    this with as many numbers. Only when a rank has an error, one broadcast of 2048 bytes follows.

    Args:
        numbers: 64-bit integers; they do not matter on a rank with an error.
        error: What keeps this rank from going on, or None.
        group: The group.

    Returns:
        The maxima, on every rank.

    Raises:
        Exception: ``error`` itself on the ranks that have one. On the others an error of the same
            kind (ValueError, TypeError, else RuntimeError) with the text of the first rank that
            has one, by its order in the group.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> max_or_raise([3, -4], None, dist.group.WORLD)
        [3, -4]
        >>> dist.destroy_process_group()
    """
    size = group.size()
    place = 0 if error is None else size - group.rank()  # the first rank's is the largest
    message = torch.tensor([place, *numbers], dtype=torch.int64).to(comm_device(group))
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    first_failed, *highest = message.tolist()
    if first_failed:
        _raise_on_all_ranks(error, size - first_failed, group)
    return highest


def _raise_on_all_ranks(error: Exception | None, group_rank: int, group: dist.ProcessGroup) -> None:
    """Share the text of one rank's error and raise."""
    kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "")
    encoded = f"{kind}\n{error}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(comm_device(group))
    dist.broadcast(message, group=group, group_src=group_rank)
    if error is not None:
        raise error
    raw = bytes(message.tolist()).rstrip(b"\0")
    kind, _, text = raw.decode(errors="replace").partition("\n")
    failed = dist.get_global_rank(group, group_rank)
    raise _KINDS.get(kind, RuntimeError)(f"rank {failed} of the process group failed: {text}")
