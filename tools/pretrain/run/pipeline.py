"""The order of micro-batches in a pipeline's stages, and the messages between stages."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mcore.parallel import ProcessGroups


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one of a rank's chunks of the model."""

    chunk: int
    batch: int
    is_forward: bool = True


def forward_order(ranks: int, chunks: int, batches: int) -> list[Pass]:
    """All forward passes of a rank: ``ranks`` micro-batches per chunk, chunk after chunk."""
    return [
        Pass(chunk, batch)
        for first in range(0, batches, ranks)
        for chunk in range(chunks)
        for batch in range(first, min(first + ranks, batches))
    ]


def training_order(rank: int, ranks: int, chunks: int, batches: int) -> list[Pass]:
    """1F1B: after enough forward passes for the later stages, forward and backward alternate.

    With several chunks per rank the order is interleaved, and ``batches`` is a multiple of
    ``ranks`` (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters").
    """
    forward = forward_order(ranks, chunks, batches)
    backward = [Pass(chunks - 1 - one.chunk, one.batch, is_forward=False) for one in forward]
    later = ranks - rank - 1
    ahead = min(later if chunks == 1 else 2 * later + (chunks - 1) * ranks, len(forward))
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += pair
    return order + backward[len(forward) - ahead :]


class StageWork(Protocol):
    """The computation of a rank on its chunks of the model."""

    def forward(self, chunk: int, batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return the chunk's output, or the loss of the last chunk. The first has no ``hidden``."""
        ...

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Backpropagate from ``output``. The loss has no ``gradient``."""
        ...


@dataclass
class _Arriving:
    """A tensor on its way from a neighbour stage."""

    buffer: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.buffer


class Pipeline:
    """One rank's place among the stages. Construction is collective on the world.

    Activations are sent to the next rank and gradients to the previous rank, over separate groups.
    With several chunks, messages around the end of the ring use two more groups. So all messages
    of a pair of ranks in a group have one direction and one order, and cannot block each other. A
    message is received during the pass before the pass that needs it.
    """

    def __init__(
        self, groups: ProcessGroups, *, chunks: int, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.ranks, self.chunks = groups.rank("pp"), groups.size("pp"), chunks
        self.device = device
        self._groups = [_copy_group(groups.pp, timeout_s) for _ in range(2 if chunks == 1 else 4)]
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the first of the model."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the last of the model."""
        return self.rank == self.ranks - 1 and chunk == self.chunks - 1

    def train(self, work: StageWork, batches: int, message: torch.Tensor) -> None:
        """Run all micro-batches forward and backward. ``message`` is a meta tensor of a message."""
        self._run(work, training_order(self.rank, self.ranks, self.chunks, batches), message)

    def evaluate(self, work: StageWork, batches: int, message: torch.Tensor) -> None:
        """Run all micro-batches forward only."""
        self._run(work, forward_order(self.ranks, self.chunks, batches), message)

    def _run(self, work: StageWork, order: Sequence[Pass], message: torch.Tensor) -> None:
        kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        with_backward = any(not one.is_forward for one in order)
        for one, arriving in self._prefetch(order, message):
            received = None if arriving is None else arriving.wait()
            place = (one.chunk, one.batch)
            if one.is_forward:
                if received is not None and with_backward:
                    received.requires_grad_()
                output = work.forward(one.chunk, one.batch, received)
                if with_backward:
                    kept[place] = received, output
                if not self.is_last(one.chunk):
                    self._send(one, output.detach())
            else:
                hidden, output = kept.pop(place)
                work.backward(one.chunk, output, received)
                if hidden is not None and hidden.grad is not None:
                    self._send(one, hidden.grad)
        for sending, _ in self._sending:
            sending.wait()
        self._sending.clear()

    def _prefetch(
        self, order: Sequence[Pass], message: torch.Tensor
    ) -> Iterator[tuple[Pass, _Arriving | None]]:
        arriving = self._receive(order[0], message)
        for place, one in enumerate(order):
            now, arriving = arriving, None
            if place + 1 < len(order):
                arriving = self._receive(order[place + 1], message)
            yield one, now

    def _receive(self, one: Pass, message: torch.Tensor) -> _Arriving | None:
        """Start to receive the input of a pass from another rank, if it has one."""
        if self.is_first(one.chunk) if one.is_forward else self.is_last(one.chunk):
            return None
        peer = self.rank - 1 if one.is_forward else self.rank + 1
        buffer = torch.empty_like(message, device=self.device)
        work = dist.irecv(buffer, group=self._choose_group(one, peer), group_src=peer % self.ranks)
        return _Arriving(buffer, _require_work(work))

    def _send(self, one: Pass, tensor: torch.Tensor) -> None:
        peer = self.rank + 1 if one.is_forward else self.rank - 1
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._choose_group(one, peer), group_dst=peer % self.ranks)
        self._sending = [(done, kept) for done, kept in self._sending if not done.is_completed()]
        self._sending.append((_require_work(work), tensor))

    def _choose_group(self, one: Pass, peer: int) -> dist.ProcessGroup:
        goes_around = peer not in range(self.ranks)
        return self._groups[2 * goes_around + one.is_forward]


def _require_work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group of its pipeline")
    return work


def _copy_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """Create another group of the same ranks. Collective on the world."""
    count = dist.get_world_size() // (1 if group is None else group.size())
    pipelines = [list(range(first, dist.get_world_size(), count)) for first in range(count)]
    timeout = datetime.timedelta(seconds=timeout_s)
    made: dist.ProcessGroup
    made, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        pipelines, timeout=timeout
    )
    return made
