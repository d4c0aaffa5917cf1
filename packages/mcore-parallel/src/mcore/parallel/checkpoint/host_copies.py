"""Copies of tensors to the CPU for a save, through pinned memory that is kept between saves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

# Pinned memory cannot be paged out, so a process keeps one buffer for all its saves.
_BUFFER_BYTES = 256 << 20
_PIECE_BYTES = _BUFFER_BYTES // 4  # several, so that the host empties one while another is filled
_ALIGNMENT = 64


class _Piece(NamedTuple):
    """A copy that was started: from the device to ``pinned``, later from there to ``target``."""

    start: int
    pinned: torch.Tensor
    target: torch.Tensor
    arrived: torch.Event


class _PinnedRing:
    """A pinned buffer that is filled in a circle and emptied in that order. For any thread."""

    def __init__(self, capacity: int, piece_bytes: int) -> None:
        self._capacity, self._piece_bytes = capacity, piece_bytes
        self._lock = threading.RLock()
        self._buffer: torch.Tensor | None = None
        self._end = 0  # of the piece that was started last
        self.num_started = 0
        self._pieces: deque[_Piece] = deque()
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, source: torch.Tensor) -> torch.Tensor:
        """Start copying a contiguous tensor. Waits for the device only to reuse pinned memory."""
        copy = torch.empty_like(source, device="cpu")
        flat, target = (tensor.view(-1).view(torch.uint8) for tensor in (source, copy))
        current = torch.accelerator.current_stream(source.device)
        with self._lock:
            side = self._streams.get(source.device) or torch.Stream(source.device)
            self._streams[source.device] = side
            side.wait_stream(current)
            with side:
                for start in range(0, flat.numel(), self._piece_bytes):
                    end = start + self._piece_bytes
                    self._start_piece(flat[start:end], target[start:end])
            current.wait_stream(side)
        return copy

    def finish(self, number: int) -> None:
        """Wait for the first pieces that were started, up to a number of ``num_started``."""
        with self._lock:
            while self._pieces and self.num_started - len(self._pieces) < number:
                self._empty_oldest()

    def _start_piece(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(
                self._capacity, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if start + source.numel() > self._capacity:
            while self._pieces and self._pieces[0].start >= start:
                self._empty_oldest()
            start = 0
        self._end = start + source.numel()
        while self._pieces and start <= self._pieces[0].start < self._end:
            self._empty_oldest()
        pinned = self._buffer[start : self._end].copy_(source, non_blocking=True)
        arrived = torch.Event(source.device)
        arrived.record()
        self._pieces.append(_Piece(start, pinned, target, arrived))
        self.num_started += 1

    def _empty_oldest(self) -> None:
        piece = self._pieces.popleft()
        piece.arrived.synchronize()
        piece.target.copy_(piece.pinned)


_ring = _PinnedRing(_BUFFER_BYTES, _PIECE_BYTES)


def start_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, which is complete after a wait for :func:`host_copies_so_far`.

    Later work on the current stream waits for the copy, so the tensor may be changed at once.
    """
    if tensor.is_cpu:
        return tensor.detach().to("cpu", copy=True)
    return _ring.start(tensor.detach().resolve_conj().resolve_neg().contiguous())


def host_copies_so_far() -> Callable[[], None]:
    """Return a function that waits for the copies that were started before this call."""
    return partial(_ring.finish, _ring.num_started)
