"""What surrounds a capture: its flag, the state it leaves as it was, and its random streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from mcore.modules.errors import GraphStateError
from mcore.parallel.rng import (
    get_all_rng_states,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)

_capturing: ContextVar[bool] = ContextVar("mcore_modules_graph_capturing", default=False)


def is_graph_capturing() -> bool:
    """Return whether this thread is inside :func:`graph_capturing`.

    Example:
        >>> is_graph_capturing()
        False
    """
    return _capturing.get()


@contextmanager
def graph_capturing() -> Iterator[None]:
    """Tell layers inside the ``with`` block to run what goes into their graphs.

    Ends with the block, whatever is raised in it; may be nested.

    Example:
        >>> with graph_capturing():
        ...     is_graph_capturing()
        True
    """
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


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


def tracker_generators() -> list[torch.Generator]:
    """Return the tracker's generators, which a graph must know to draw new numbers from them."""
    states = get_all_rng_states().values()
    return [state for state in states if isinstance(state, torch.Generator)]


@contextmanager
def refusing_plain_forks() -> Iterator[None]:
    """Refuse forks of a tracker with plain states, whose numbers a graph would repeat for ever."""
    tracker: Any = get_cuda_rng_tracker()
    if is_graph_safe_cuda_rng_tracker(tracker) or tracker.is_inference_rng_tracker:
        yield
        return
    tracker.fork = _refused_fork
    try:
        yield
    finally:
        del tracker.fork


def _refused_fork(*_: Any, **__: Any) -> Any:
    raise GraphStateError(
        "a layer draws from a stream of the random tracker, whose plain states no graph can "
        "advance, so that each replay would repeat its numbers; pass use_cudagraphable_rng=True to "
        "model_parallel_cuda_manual_seed() or initialize_rng_tracker()"
    )
