"""The ranks that save or load together, and the few small messages they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore.parallel.agreement import highest, reports_of_failures
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
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
        """Run ``step``, which has no collectives, and return its result.

        When it fails on any rank, all raise a CheckpointingException with the reports of all.
        """
        cause: Exception | None = None
        try:
            result = step()
        except Exception as error:
            cause = error
        report = None if cause is None else describe_error(cause)
        if self.group is not None:
            with lost_ranks_named():
                reports = reports_of_failures(report, self.group)
            report = merge_reports(reports) if reports else None
        if report is not None:
            raise CheckpointingException(report) from cause
        return result

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

    def _gather(self, payload: bytes) -> tuple[list[torch.Tensor] | None, list[int]]:
        device = comm_device(self.group)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(payload)
        dist.all_reduce(sizes, group=self.group)
        lengths = [int(length) for length in sizes.tolist()]
        width = max(1, *lengths)
        own = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        received = None
        if self.is_first:
            received = [torch.empty(width, dtype=torch.uint8, device=device) for _ in lengths]
        dist.gather(own.to(device), received, group=self.group, group_dst=0)
        return received, lengths


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
