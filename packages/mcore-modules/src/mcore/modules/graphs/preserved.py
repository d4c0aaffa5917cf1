"""Restoration of buffers and random states after warm-up and capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def preserved_state(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Restore buffers and random states (the CPU's, the device's, the tracker's) after the block.

    Also after an exception. Buffers are restored in place, since captured graphs hold their memory.
    """
    buffers = _buffers(modules)
    saved = [buffer.detach().clone() for buffer in buffers]
    tracker = _TrackerState()
    try:
        with _preserved_generators(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
        tracker.restore()


def _buffers(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    distinct = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    return list(distinct.values())


@contextmanager
def _preserved_generators(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        with torch.random.fork_rng(devices=[index], device_type=device.type):
            yield


class _TrackerState:
    """The random streams of the process-wide tracker: tensors, or generators that are live."""

    def __init__(self) -> None:
        from mcore.parallel.rng import get_cuda_rng_tracker

        self._tracker = get_cuda_rng_tracker()
        self._states: dict[str, Any] = dict(self._tracker.get_states())
        self._live = {
            name: state.get_state()
            for name, state in self._states.items()
            if isinstance(state, torch.Generator)
        }
        self._seeds = set(getattr(self._tracker, "seeds_", ()))

    def restore(self) -> None:
        # In place: captured graphs are tied to the generators.
        for name, state in self._live.items():
            self._states[name].set_state(state)
        if self._states:
            self._tracker.set_states(self._states)
            # set_states forgets which seeds are taken.
            self._tracker.seeds_ = self._seeds  # type: ignore[attr-defined]
