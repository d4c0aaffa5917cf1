"""Agreement among the ranks of a group: equal arguments, and one rank's error raised on all.

The first message always has 512 bytes: gloo ends the process if the ranks' messages differ in size.
Texts, also of a fixed size, follow only after a failure.

A rank passes an error that it caught in a list, which the raise empties. If a variable held the
error, the frames and with them the process group and its threads would stay until a collection of
garbage.

All-reduces with MAX compare numbers: every rank sends ``x`` and ``-x``, so the results are the
largest ``x`` and minus the smallest. They are negatives of each other only if all ranks sent the
same ``x``. One collective thus compares any number of values, and every rank sees the outcome.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

from mcore.parallel.groups import comm_device
from mcore.parallel.tensor_memory import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_T = TypeVar("_T")
_BLOCK = 64  # int64 in the first message
_ERROR_BYTES = 2048  # longer texts are cut
_REPORT_BYTES = 4096
_MAX_REPORTS = 16  # so a message does not grow with the number of ranks
_FACT_BYTES = 512
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (OverflowError, RuntimeError, TypeError, ValueError)
}


def max_or_raise(
    numbers: Sequence[int | torch.Tensor],
    failed: list[Exception],
    group: dist.ProcessGroup,
    facts: str = "",
    device: torch.device | None = None,
) -> list[int]:
    """Return the ranks' largest numbers. An error of one rank is raised on all with kind and text.
    ``failed`` has this rank's error if there is one. No tensor is waited for before the all-reduce.

    One all-reduce (MAX of 64 int64), and one more for numbers that do not fit. ``facts`` and the
    number of numbers must be equal on all ranks without an error, else all raise ValueError.
    ``device`` is the result of :func:`comm_device`, if the caller has it.
    """
    size, device = group.size(), device or comm_device(group)
    place = size - group.rank() if failed else 0  # largest for the first rank that failed
    digest = 0 if failed else text_digest(f"{len(numbers)} {facts}")
    block = [place, digest, -digest, *([] if failed else numbers)][:_BLOCK]
    block += [0] * (_BLOCK - len(block))
    first_failed, largest, minus_smallest, *maxima = _reduce_max(block, device, group)
    if first_failed:
        source = size - first_failed
        own = [name for one in failed for name, known in _KINDS.items() if isinstance(one, known)]
        text = f"{next(iter(own), '')}\n{failed[0] if failed else ''}"
        message = _encode(text, _ERROR_BYTES, group)
        dist.broadcast(message, group=group, group_src=source)
        if failed:
            raise failed.pop()
        [received] = _decode(message, _ERROR_BYTES)
        kind, _, text = received.partition("\n")
        rank = dist.get_global_rank(group, source)
        raise _KINDS.get(kind, RuntimeError)(f"rank {rank} of the process group failed: {text}")
    if largest != -minus_smallest:
        message = _encode(facts or f"{len(numbers)} numbers to compare", _FACT_BYTES, group)
        [mine] = _decode(message, _FACT_BYTES)
        dist.broadcast(message, group=group, group_src=0)
        [first] = _decode(message, _FACT_BYTES)
        others = "Other ranks have other values" if mine == first else f"The first rank has {first}"
        raise ValueError(
            f"the ranks of the process group disagree: this rank (global rank {dist.get_rank()}) "
            f"has {mine}. {others}. Call with the same arguments on every rank of the group"
        )
    rest = numbers[len(maxima) :]
    return maxima[: len(numbers)] + (_reduce_max(rest, device, group) if rest else [])


def require_equal(
    arguments: Mapping[str, object],
    failed: list[Exception],
    group: dist.ProcessGroup,
    state: object = "",
) -> bool:
    """Raise ValueError on all ranks if the text of an argument differs, or raise a rank's error on
    all. Return whether ``state`` is equal on all ranks too.
    """
    digests = [text_digest(str(value)) for value in (state, *arguments.values())]
    numbers = [number for digest in digests for number in (digest, -digest)]
    facts = f"the arguments {', '.join(arguments)}"
    reduced = iter(max_or_raise(numbers, failed, group, facts))
    is_equal = [
        largest == -minus_smallest for largest, minus_smallest in zip(reduced, reduced, strict=True)
    ]
    pairs = zip(arguments.items(), is_equal[1:], strict=True)
    different = [f"{name} ({value} here)" for (name, value), same in pairs if not same]
    if different:
        raise ValueError(
            f"the ranks were given different arguments: {', '.join(different)}. "
            "Pass the same values on every rank"
        )
    return is_equal[0]


@functools.cache
def is_checking_tensors() -> bool:
    """Return whether ``MCORE_DEBUG_COLLECTIVES=1``, as read at the first call."""
    return os.environ.get("MCORE_DEBUG_COLLECTIVES", "0") not in ("", "0")


def check_tensors(operation: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """With ``MCORE_DEBUG_COLLECTIVES=1``, raise ValueError on all ranks if their tensors differ.
    One all-reduce (MAX of 64 int64). The variable is read at the first call.
    """
    if is_checking_tensors():
        facts = f"{operation} of {tensor.dtype} {tuple(tensor.shape)} on {tensor.device.type}"
        max_or_raise((), [], group, facts)


def check_on_all_ranks(
    check: Callable[[], _T], describe: Callable[[_T], str], group: dist.ProcessGroup | None
) -> _T:
    """Return the result of a check of arguments. With ``MCORE_DEBUG_COLLECTIVES=1`` its error is
    raised on all ranks, and so is ValueError if the descriptions of the results differ.
    """
    if group is None or not is_checking_tensors():
        return check()
    failed, result, facts = list[Exception](), None, ""
    try:
        result = check()
        facts = describe(result)
    except Exception as error:
        failed.append(error)
    max_or_raise((), failed, group, facts)
    return cast("_T", result)


def gathered_reports(report: str | None, group: dist.ProcessGroup) -> dict[int, str]:
    """Return the reports of all ranks that have one, by rank in the group.

    One all-reduce (MAX of uint8) of a byte a rank. If a rank has a report, one more of 4096 bytes
    for each of the first 16 that have one. The text of the others says that it was not sent.
    """
    flags = torch.zeros(group.size(), dtype=torch.uint8, device=comm_device(group))
    flags[group.rank()] = report is not None
    # NCCL's all-reduce is a tree, its all-gather a ring with a step for each rank.
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    ranks: list[int] = flags.cpu().nonzero().flatten().tolist()
    shown = ranks[:_MAX_REPORTS]
    if not shown:
        return {}
    texts = flags.new_zeros(len(shown), _REPORT_BYTES)
    if report is not None and group.rank() in shown:
        texts[shown.index(group.rank())] = _encode(report or "unknown error", _REPORT_BYTES, group)
    dist.all_reduce(texts, op=dist.ReduceOp.MAX, group=group)
    reports = dict(zip(shown, _decode(texts.flatten(), _REPORT_BYTES), strict=True))
    return reports | dict.fromkeys(ranks[_MAX_REPORTS:], "failed too, the text was not sent")


def first_difference(digests: Sequence[bytes], group: dist.ProcessGroup) -> int:
    """Return the first index at which the ranks' digests differ, else the number of digests.

    One all-reduce (MAX of uint8, twice the digests, which all have one length).
    """
    if not digests:
        return 0
    own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    own = own.view(len(digests), -1)
    both = torch.stack([own, 255 - own]).to(comm_device(group))  # unsigned, so 255 - x for -x
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    highest_bytes, inverse_of_lowest = both.cpu()
    differs = (highest_bytes != 255 - inverse_of_lowest).any(dim=1)
    return int(differs.nonzero()[0]) if differs.any() else len(digests)


def text_digest(text: str) -> int:
    """Return a digest of a text in 63 bits, whose negative fits into an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _reduce_max(
    numbers: Sequence[int | torch.Tensor], device: torch.device, group: dist.ProcessGroup
) -> list[int]:
    """Return the maxima over a group, without waiting for a device before the all-reduce."""
    to_accelerator = device.type != "cpu"  # a copy to the CPU must have arrived before it is sent
    plain = [0 if isinstance(number, torch.Tensor) else number for number in numbers]
    message = torch.tensor(plain, dtype=torch.int64, device="cpu").to(
        device, non_blocking=to_accelerator
    )
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            message[index] = number.to(device, non_blocking=to_accelerator)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in message.tolist()]


def _encode(text: str, num_bytes: int, group: dist.ProcessGroup) -> torch.Tensor:
    padded = bytearray(text.encode()[:num_bytes].ljust(num_bytes, b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8).to(comm_device(group))


def _decode(message: torch.Tensor, num_bytes: int) -> list[str]:
    raw = bytes(memory_of(message.cpu()))
    texts = [raw[start : start + num_bytes] for start in range(0, len(raw), num_bytes)]
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]
