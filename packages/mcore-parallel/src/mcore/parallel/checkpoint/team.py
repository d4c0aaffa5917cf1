"""The ranks that save or load together, and the few small messages they exchange."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore.parallel.agreement import gathered_reports, highest
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    describe_error,
    merge_reports,
)
from mcore.parallel.groups import GroupLike, as_process_group, comm_device
from mcore.parallel.tensor_memory import bytes_of
from mcore.parallel.torch_compat import is_distributed

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """A process group, or None for a single process, whose methods are collectives."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written only once."""
        return self.rank == 0

    def max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers, place by place (64-bit integers)."""
        if self.group is None:
            return list(numbers)
        with lost_ranks_named():
            return highest(numbers, self.group)

    def agree(self, step: Callable[[], T]) -> T:
        """Run ``step``, which has no collectives, and return its result; one all-reduce.

        When it fails on any rank, all raise the reports of all: a DamagedCheckpointError where each
        of them is one, else a CheckpointingException.
        """
        result, _ = self._agree(lambda: (step(), ()), 0, self.max)
        return result

    def agree_any(
        self, step: Callable[[], tuple[T, Sequence[int]]], count: int
    ) -> tuple[T, list[int]]:
        """As :meth:`agree`; of the ``count`` flags that a step returns too, all get any rank's."""
        return self._agree(step, count, self._any_of)

    def share(self, step: Callable[[], Sequence[bytes]], count: int = 1) -> list[bytes]:
        """As :meth:`agree`, but all get the ``count`` bytes that the first rank's step returns."""

        def with_lengths() -> tuple[Sequence[bytes], list[int]]:
            payloads = step()
            return payloads, [len(one) if self.is_first else 0 for one in payloads]

        payloads, lengths = self._agree(with_lengths, count, self.max)
        if self.group is None or not any(lengths):
            return list(payloads)
        joined = io.BytesIO(self._broadcast(b"".join(payloads), sum(lengths)))
        return [joined.read(length) for length in lengths]

    def _agree(
        self,
        step: Callable[[], tuple[T, Sequence[int]]],
        count: int,
        combine: Callable[[Sequence[int]], list[int]],
    ) -> tuple[T, list[int]]:
        cause: Exception | None = None
        failure = 0
        numbers: Sequence[int] = [0] * count
        try:
            result, numbers = step()
        except Exception as error:
            cause = error
            failure = 1 if isinstance(error, DamagedCheckpointError) else 2
        failure, *combined = combine([failure, *numbers])
        if failure:
            report = None if cause is None else describe_error(cause)
            kind = DamagedCheckpointError if failure == 1 else CheckpointingException
            raise kind(self._merged(report)) from cause
        return result, combined

    def _merged(self, report: str | None) -> str:
        """Return the reports of all ranks that failed, one of which is this process when alone."""
        if self.group is None:
            return str(report)
        with lost_ranks_named():
            return merge_reports(gathered_reports(report, self.group))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collect every rank's bytes on the first rank; the others get an empty list."""
        if self.group is None:
            return [payload]
        with lost_ranks_named():
            received, lengths = self._gather(payload)
        return [
            bytes_of(padded)[:length]
            for padded, length in zip(received or [], lengths, strict=False)
        ]

    def _broadcast(self, payload: bytes, length: int) -> bytes:
        device = comm_device(self.group)
        if self.is_first:
            message = _as_tensor(payload).to(device)
        else:
            message = torch.empty(length, dtype=torch.uint8, device=device)
        with lost_ranks_named():
            dist.broadcast(message, group=self.group, group_src=0)
        return payload if self.is_first else bytes_of(message)

    def scatter_bytes(self, payloads: Sequence[bytes]) -> bytes:
        """Return this rank's one of the bytes that the first rank has for each rank."""
        if self.group is None:
            return payloads[0]
        [width] = self.max([max(map(len, payloads), default=0)])
        device = comm_device(self.group)
        message = torch.empty(8 + width, dtype=torch.uint8, device=device)
        padded = [len(one).to_bytes(8, "big") + one.ljust(width, b"\0") for one in payloads]
        with lost_ranks_named():
            sent = [_as_tensor(one).to(device) for one in padded] if self.is_first else None
            dist.scatter(message, sent, group=self.group, group_src=0)
        received = bytes_of(message)
        return received[8 : 8 + int.from_bytes(received[:8], "big")]

    def _any_of(self, flags: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' small numbers; a byte each, however many they are."""
        if self.group is None:
            return list(flags)
        message = _as_tensor(bytes(flags)).to(comm_device(self.group))
        with lost_ranks_named():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
        return list(bytes_of(message))

    def _gather(self, payload: bytes) -> tuple[list[torch.Tensor] | None, list[int]]:
        device = comm_device(self.group)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(payload)
        dist.all_reduce(sizes, group=self.group)
        lengths = [int(length) for length in sizes.tolist()]
        width = max(1, *lengths)
        own = _as_tensor(payload.ljust(width, b"\0"))
        received = None
        if self.is_first:
            received = [torch.empty(width, dtype=torch.uint8, device=device) for _ in lengths]
        dist.gather(own.to(device), received, group=self.group, group_dst=0)
        return received, lengths


def _as_tensor(payload: bytes) -> torch.Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Turn the error of a collective, which has many types and texts, into ours."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointingException(
            f"a participating rank cannot be reached; it may have died ({describe_error(error)})"
        ) from error


def team_of(process_group: GroupLike | None) -> Team:
    """Return the team of a group: None is the world, or this process where there is none."""
    if not is_distributed():
        return Team(None, 0, 1)
    group = as_process_group(process_group) or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}"
        )
    return Team(group, group.rank(), group.size())
