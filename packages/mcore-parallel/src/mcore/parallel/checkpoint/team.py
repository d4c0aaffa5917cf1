"""The ranks that save or load together, and the few small messages they exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    merge_reports,
)
from mcore.parallel.groups import GroupLike, as_process_group, comm_device
from mcore.parallel.tensor_memory import bytes_of
from mcore.parallel.torch_compat import all_gather_single, is_distributed

__all__ = ["Team", "lost_ranks_named", "team_of"]

_REPORT_BYTES = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """A process group seen as one party; group None is a single process.

    Every method is a collective over the group: all its ranks call it, all get the result unless
    stated otherwise. Messages are fixed-size tensors on the group's own device.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    def max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers, place by place (64-bit integers)."""
        if self.group is None:
            return list(numbers)
        with lost_ranks_named():
            tensor = torch.tensor(numbers, dtype=torch.int64, device=comm_device(self.group))
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
            return [int(number) for number in tensor.tolist()]

    def agree(self, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank; when it fails on any, raise the same error on all.

        Args:
            step: Work without collectives.

        Returns:
            This rank's result.

        Raises:
            CheckpointingException: ``step`` raised on some rank, the text has the reports of the
                failing ranks; or a rank cannot be reached.
        """
        cause: Exception | None = None
        try:
            result = step()
        except Exception as error:
            cause = error
        if self.max([cause is not None])[0]:
            raise CheckpointingException(self._reports(cause)) from cause
        return result

    def _reports(self, error: Exception | None) -> str:
        own = "" if error is None else describe_error(error)
        if self.group is None:
            return own
        gathered = self._gather_texts(own)
        return merge_reports({rank: text for rank, text in enumerate(gathered) if text})

    def _gather_texts(self, text: str) -> list[str]:
        device = comm_device(self.group)
        encoded = text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
        own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
        every = torch.empty(self.size * _REPORT_BYTES, dtype=torch.uint8, device=device)
        with lost_ranks_named():
            all_gather_single(every, own, self.group)
            raw = bytes_of(every)
        parts = [raw[at : at + _REPORT_BYTES] for at in range(0, len(raw), _REPORT_BYTES)]
        return [part.rstrip(b"\0").decode(errors="replace") for part in parts]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collect every rank's bytes on the first rank; the others get an empty list."""
        if self.group is None:
            return [payload]
        with lost_ranks_named():
            parts, lengths = self._gather(payload)
        return [bytes_of(part)[:length] for part, length in zip(parts or [], lengths, strict=False)]

    def _gather(self, payload: bytes) -> tuple[list[torch.Tensor] | None, list[int]]:
        device = comm_device(self.group)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(payload)
        dist.all_reduce(sizes, group=self.group)
        lengths = [int(length) for length in sizes.tolist()]
        width = max(1, *lengths)
        own = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        parts = None
        if self.is_first:
            parts = [torch.empty(width, dtype=torch.uint8, device=device) for _ in lengths]
        dist.gather(own.to(device), parts, group=self.group, group_dst=0)
        return parts, lengths


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Turn the error of a collective, which has many types and texts, into ours."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointingException(
            f"a rank that takes part cannot be reached, it may have died ({describe_error(error)})"
        ) from error


def team_of(process_group: GroupLike | None) -> Team:
    """Return the team of a group: None is the world, or this process where there is none.

    No communication.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: The object is no process group.
    """
    if not is_distributed():
        return Team(None, 0, 1)
    group = as_process_group(process_group) or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}"
        )
    return Team(group, group.rank(), group.size())
