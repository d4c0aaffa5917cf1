"""Maxima over a group that also carry the errors of single ranks, so that all ranks raise.

Ranks find out whether they hold equal numbers in the same message: a number travels with its
negative, and the largest of both belong to one number only if all ranks sent that one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore.parallel.groups import comm_device

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["first_difference", "max_or_raise", "text_digest"]

_TEXT_BYTES = 2048
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (OverflowError, RuntimeError, TypeError, ValueError)
}


def max_or_raise(
    numbers: Sequence[int | torch.Tensor], error: Exception | None, group: dist.ProcessGroup
) -> list[int]:
    """Return the largest of all ranks' numbers, place by place, unless a rank has an error.

    One all-reduce (MAX of int64, one more than the numbers) over ``group``; every rank of it calls
    this with as many numbers. A tensor on the device of the group's collectives is not waited for
    before them. Only when a rank has an error, one broadcast of 2048 bytes follows.

    Args:
        numbers: 64-bit integers, also as int64 tensors of shape ``[]`` on any device; they do not
            matter on a rank with an error.
        error: What keeps this rank from going on, or None.
        group: The group.

    Returns:
        The maxima, on every rank.

    Raises:
        Exception: ``error`` itself on the ranks that have one. On the others an error of the same
            kind (OverflowError, TypeError, ValueError, else RuntimeError) with the text of the
            first rank that has one, by its order in the group.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> max_or_raise([3, torch.tensor(-4)], None, dist.group.WORLD)
        [3, -4]
        >>> dist.destroy_process_group()
    """
    size = group.size()
    place = 0 if error is None else size - group.rank()  # the first rank's is the largest
    message = _message([place, *numbers], comm_device(group))
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    first_failed, *highest = message.tolist()
    if first_failed:
        _raise_on_all_ranks(error, size - first_failed, group)
    return highest


def _message(numbers: Sequence[int | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Put the numbers on the device of a group's collectives, without waiting for a device."""
    to_accelerator = device.type != "cpu"  # the other way the copy must have arrived
    plain = [0 if isinstance(number, torch.Tensor) else number for number in numbers]
    message = torch.tensor(plain, dtype=torch.int64).to(device, non_blocking=to_accelerator)
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            message[index] = number.to(device, non_blocking=to_accelerator)
    return message


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


def text_digest(text: str) -> int:
    """Return a number of 63 bits that stands for a text, so that its negative is one of 64 bits.

    Example:
        >>> text_digest("a") == text_digest("b"), 0 <= text_digest("a") < 2**63
        (False, True)
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def first_difference(digests: Sequence[bytes], group: dist.ProcessGroup) -> int:
    """Return the first place at which the ranks' digests are not all equal, else their number.

    One all-reduce (MAX of uint8, twice the digests) over ``group``; every rank of it calls this
    with as many digests, all of one length, and gets the result.
    """
    if not digests:
        return 0
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    own = own.view(len(digests), -1)
    both = torch.stack([own, 255 - own]).to(comm_device(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    highest, inverse_of_lowest = both.cpu()
    differs = (highest != 255 - inverse_of_lowest).any(dim=1)
    return int(differs.nonzero()[0]) if differs.any() else len(digests)
