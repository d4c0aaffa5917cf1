"""Agreement among the ranks of a group: equal numbers, and one rank's errors raised by all.

A small all-reduce says whether a rank failed; only then texts of a fixed size follow.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore.parallel.groups import comm_device
from mcore.parallel.tensor_memory import memory_of
from mcore.parallel.torch_compat import all_gather_single

if TYPE_CHECKING:
    from collections.abc import Sequence

_ERROR_BYTES = 2048
_REPORT_BYTES = 4096
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (OverflowError, RuntimeError, TypeError, ValueError)
}


def highest(numbers: Sequence[int | torch.Tensor], group: dist.ProcessGroup) -> list[int]:
    """Return the largest of all ranks' numbers, place by place, after one all-reduce of int64.

    No tensor is waited for before it. A number that is sent with its negative can be compared.
    """
    message = _message(numbers, comm_device(group))
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in message.tolist()]


def max_or_raise(
    numbers: Sequence[int | torch.Tensor], error: Exception | None, group: dist.ProcessGroup
) -> list[int]:
    """Return :func:`highest`; a rank's error is raised there, its kind and text on the others.

    The all-reduce has one more number; only after an error does a broadcast of 2048 bytes follow.
    """
    size = group.size()
    place = 0 if error is None else size - group.rank()  # the first rank's is the largest
    first_failed, *maxima = highest([place, *numbers], group)
    if not first_failed:
        return maxima
    failed = size - first_failed
    kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "")
    message = _encoded(f"{kind}\n{error}", _ERROR_BYTES, group)
    dist.broadcast(message, group=group, group_src=failed)
    if error is not None:
        raise error
    [received] = _decoded(message, _ERROR_BYTES)
    kind, _, text = received.partition("\n")
    rank = dist.get_global_rank(group, failed)
    raise _KINDS.get(kind, RuntimeError)(f"rank {rank} of the process group failed: {text}")


def reports_of_failures(report: str | None, group: dist.ProcessGroup) -> dict[int, str]:
    """Return on every rank the reports of all ranks that failed, by their rank in the group.

    One all-reduce of one number; only after a failure an all-gather of 4096 bytes a rank.
    """
    if not highest([report is not None], group)[0]:
        return {}
    text = "" if report is None else report or "unknown error"
    own = _encoded(text, _REPORT_BYTES, group)
    every = own.new_empty(group.size() * _REPORT_BYTES)
    all_gather_single(every, own, group)
    return {rank: found for rank, found in enumerate(_decoded(every, _REPORT_BYTES)) if found}


def first_difference(digests: Sequence[bytes], group: dist.ProcessGroup) -> int:
    """Return the first place at which the ranks' digests are not all equal, else their number.

    One all-reduce (MAX of uint8, twice the digests, which all have one length).
    """
    if not digests:
        return 0
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    own = own.view(len(digests), -1)
    both = torch.stack([own, 255 - own]).to(comm_device(group))
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    highest_bytes, inverse_of_lowest = both.cpu()
    differs = (highest_bytes != 255 - inverse_of_lowest).any(dim=1)
    return int(differs.nonzero()[0]) if differs.any() else len(digests)


def text_digest(text: str) -> int:
    """Return a number of 63 bits that stands for a text, so that its negative is one of 64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _message(numbers: Sequence[int | torch.Tensor], device: torch.device) -> torch.Tensor:
    """Put the numbers on the device of a group's collectives, without waiting for a device."""
    to_accelerator = device.type != "cpu"  # the other way the copy must have arrived
    plain = [0 if isinstance(number, torch.Tensor) else number for number in numbers]
    message = torch.tensor(plain, dtype=torch.int64, device="cpu").to(
        device, non_blocking=to_accelerator
    )
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            message[index] = number.to(device, non_blocking=to_accelerator)
    return message


def _encoded(text: str, num_bytes: int, group: dist.ProcessGroup) -> torch.Tensor:
    padded = bytearray(text.encode()[:num_bytes].ljust(num_bytes, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).to(comm_device(group))


def _decoded(message: torch.Tensor, num_bytes: int) -> list[str]:
    raw = bytes(memory_of(message.cpu()))
    texts = [raw[start : start + num_bytes] for start in range(0, len(raw), num_bytes)]
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]
