"""The ranks that save or load together, and their collectives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore.parallel.agreement import gathered_reports, max_or_raise
from mcore.parallel.checkpoint import errors
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

    @cached_property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the files that exist once."""
        return self.rank == 0

    @cached_property
    def _device(self) -> torch.device:
        return comm_device(self.group)

    def agree(self, step: Callable[[], T]) -> T:
        """Run ``step``, which has no collectives, and return its result. One all-reduce.

        If it fails on any rank, all ranks raise the reports of all: a DamagedCheckpointError if
        each of them is one, else a CheckpointingException.
        """
        return self.agree_max(lambda: (step(), ()), 0)[0]

    def agree_max(
        self, step: Callable[[], tuple[T, Sequence[int]]], count: int, *, are_flags: bool = False
    ) -> tuple[T, list[int]]:
        """Like :meth:`agree`, for a step that also returns ``count`` integers, for their maxima.

        Flags, of which there may be many, are sent as bytes.
        """
        causes: list[Exception] = []  # see agreement
        failure = 0
        numbers: Sequence[int] = [0] * count
        try:
            result, numbers = step()
        except Exception as error:
            causes.append(error)
            # The maximum decides: one failure of another kind makes it no mere damage.
            failure = 1 if isinstance(error, errors.DamagedCheckpointError) else 2
        combined = [failure, *numbers]
        if self.group is not None:
            with name_lost_ranks():
                if are_flags:
                    message = _make_tensor(bytes(combined)).to(self._device)
                    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
                    combined = list(bytes_of(message))
                else:
                    combined = max_or_raise(combined, [], self.group, device=self._device)
        failure, *combined = combined
        if failure:
            kind = errors.DamagedCheckpointError if failure == 1 else errors.CheckpointingException
            raise self._merge_reports(causes, kind) from (causes.pop() if causes else None)
        return result, combined

    def share(self, step: Callable[[], Sequence[bytes]], count: int = 1) -> list[bytes]:
        """Like :meth:`agree`, but all get the ``count`` byte strings of the first rank's step."""

        def step_with_lengths() -> tuple[Sequence[bytes], list[int]]:
            payloads = step()
            return payloads, [len(one) if self.is_first else 0 for one in payloads]

        payloads, lengths = self.agree_max(step_with_lengths, count)
        if self.group is None or not any(lengths):
            return list(payloads)
        payload = b"".join(payloads) if self.is_first else bytes(sum(lengths))
        message = _make_tensor(payload).to(self._device)
        with name_lost_ranks():
            dist.broadcast(message, group=self.group, group_src=0)
        joined = io.BytesIO(payload if self.is_first else bytes_of(message))
        return [joined.read(length) for length in lengths]

    def _merge_reports(
        self, causes: Sequence[Exception], kind: type[errors.CheckpointingException]
    ) -> errors.CheckpointingException:
        """Return an error with the reports of all failed ranks. Two all-reduces."""
        report = errors.describe_error(causes[0]) if causes else None
        if self.group is None:
            return kind(report)
        with name_lost_ranks():
            return kind(errors.merge_reports(gathered_reports(report, self.group)))

    def gather(self, payload: bytes, width: int) -> list[bytes]:
        """Return the bytes of all ranks on the first rank, else none. One gather.

        Each is padded with zeros to ``width``, which is equal on all ranks.
        """
        if self.group is None:
            return [payload]
        padded = _make_tensor(payload.ljust(width, b"\0")).to(self._device)
        received = [torch.empty_like(padded) for _ in range(self.size)] if self.is_first else None
        with name_lost_ranks():
            dist.gather(padded, received, group=self.group, group_dst=0)
        return [bytes_of(one) for one in received or []]

    def scatter(
        self, step: Callable[[], tuple[T, Sequence[bytes]]], width: int
    ) -> tuple[T | None, bytes]:
        """Run ``step`` on the first rank. All ranks return their element of its second result.

        The first rank returns its first result too, the others None. One scatter of at most
        ``width`` bytes a rank, which is equal on all ranks. If the step fails, all ranks raise its
        report.
        """
        result: T | None = None
        if self.group is None:
            result, [own] = step()
            return result, own
        causes, sent = list[Exception](), None
        # A first byte of 1 says that the step succeeded.
        message = torch.zeros(1 + width, dtype=torch.uint8, device=self._device)
        if self.is_first:
            try:
                result, payloads = step()
                padded = [b"\1" + one.ljust(width, b"\0") for one in payloads]
                sent = [_make_tensor(one).to(message.device) for one in padded]
            except Exception as error:
                causes, sent = [error], [message.clone() for _ in range(self.size)]
        with name_lost_ranks():
            dist.scatter(message, sent, group=self.group, group_src=0)
        received = bytes_of(message)
        if not received[0]:
            kind = errors.CheckpointingException
            raise self._merge_reports(causes, kind) from (causes.pop() if causes else None)
        return result, received[1:]


def _make_tensor(payload: bytes) -> torch.Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """Raise errors of collectives, which have many types and texts, as CheckpointingException."""
    try:
        yield
    except RuntimeError as error:
        raise errors.CheckpointingException(
            "a participating rank cannot be reached and may have died "
            f"({errors.describe_error(error)})"
        ) from error


def team_of(process_group: GroupLike | None) -> Team:
    """Return the team of a group. None is the world, or this process without one."""
    if not is_distributed():
        return Team(None, 0, 1)
    group = as_process_group(process_group) or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}"
        )
    return Team(group, group.rank(), group.size())
