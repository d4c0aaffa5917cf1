"""The order in which a pipeline's stages run their micro-batches, and what passes between them."""

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
    """All forward passes of a rank: ``ranks`` micro-batches through each chunk, then the next."""
    return [
        Pass(chunk, batch)
        for first in range(0, batches, ranks)
        for chunk in range(chunks)
        for batch in range(first, min(first + ranks, batches))
    ]


def training_order(rank: int, ranks: int, chunks: int, batches: int) -> list[Pass]:
    """One forward, one backward, once a rank is as far ahead as the stages behind it need.

    Interleaved where a rank has several chunks; then ``batches`` is a multiple of ``ranks``
    (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters").
    """
    forward = forward_order(ranks, chunks, batches)
    backward = [Pass(chunks - 1 - one.chunk, one.batch, is_forward=False) for one in forward]
    behind = ranks - rank - 1
    ahead = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks, len(forward))
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += pair
    return order + backward[len(forward) - ahead :]


class StageWork(Protocol):
    """What a rank does with its chunks of the model."""

    def forward(self, chunk: int, batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """The chunk's output, or the loss where it is the last; no ``hidden`` at the first."""
        ...

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Leave gradients on what made the output; no ``gradient`` at the loss."""
        ...


@dataclass
class _Arriving:
    """What is on its way from a neighbour."""

    buffer: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.buffer


class Pipeline:
    """One rank's place among the stages; all ranks make one, collective on the world.

    Activations go to the next rank and gradients to the one before, each kind, and with several
    chunks each way around the end of the ring, over a group of its own: so the messages of a pair
    of ranks in a group go one way, in one order, and no backend can make them wait for each other.
    A message is received while the pass before the one that needs it runs.
    """

    def __init__(
        self, groups: ProcessGroups, *, chunks: int, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.ranks, self.chunks = groups.rank("pp"), groups.size("pp"), chunks
        self.device = device
        self._groups = [_group_like(groups.pp, timeout_s) for _ in range(2 if chunks == 1 else 4)]
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the first of the model."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk of this rank is the last of the model."""
        return self.rank == self.ranks - 1 and chunk == self.chunks - 1

    def train(self, work: StageWork, batches: int, message: torch.Tensor) -> None:
        """Run all micro-batches forward and backward; ``message`` is like what stages send."""
        self._run(work, training_order(self.rank, self.ranks, self.chunks, batches), message)

    def evaluate(self, work: StageWork, batches: int, message: torch.Tensor) -> None:
        """Run all micro-batches forward only."""
        self._run(work, forward_order(self.ranks, self.chunks, batches), message)

    def _run(self, work: StageWork, order: Sequence[Pass], message: torch.Tensor) -> None:
        kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        with_backward = any(not one.is_forward for one in order)
        for one, arriving in self._with_next_on_its_way(order, message):
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

    def _with_next_on_its_way(
        self, order: Sequence[Pass], message: torch.Tensor
    ) -> Iterator[tuple[Pass, _Arriving | None]]:
        arriving = self._receive(order[0], message)
        for place, one in enumerate(order):
            now, arriving = arriving, None
            if place + 1 < len(order):
                arriving = self._receive(order[place + 1], message)
            yield one, now

    def _receive(self, one: Pass, message: torch.Tensor) -> _Arriving | None:
        """Start to receive what a pass needs from another rank, if anything."""
        if self.is_first(one.chunk) if one.is_forward else self.is_last(one.chunk):
            return None
        peer = self.rank - 1 if one.is_forward else self.rank + 1
        buffer = torch.empty_like(message, device=self.device)
        work = dist.irecv(buffer, group=self._channel(one, peer), group_src=peer % self.ranks)
        return _Arriving(buffer, _begun(work))

    def _send(self, one: Pass, tensor: torch.Tensor) -> None:
        peer = self.rank + 1 if one.is_forward else self.rank - 1
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._channel(one, peer), group_dst=peer % self.ranks)
        self._sending = [(done, kept) for done, kept in self._sending if not done.is_completed()]
        self._sending.append((_begun(work), tensor))

    def _channel(self, one: Pass, peer: int) -> dist.ProcessGroup:
        goes_around = peer not in range(self.ranks)
        return self._groups[2 * goes_around + one.is_forward]


def _begun(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the group of its pipeline")
    return work


def _group_like(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """Another group of the same ranks, on each of the world."""
    count = dist.get_world_size() // (1 if group is None else group.size())
    pipelines = [list(range(first, dist.get_world_size(), count)) for first in range(count)]
    timeout = datetime.timedelta(seconds=timeout_s)
    made: dist.ProcessGroup
    made, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        pipelines, timeout=timeout
    )
    return made
