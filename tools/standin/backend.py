"""The device in torch: the module ``torch.standin``, and the functions of ``torch.accelerator``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

from standin import clocks, dispatch, graphs, guard, memory, recording
from standin.collectives import register_collectives
from standin.generators import Generator, default_generators, make_default_generators
from standin.memory import COUNT, NAME

_libraries: list[Any] = []
_forever = ExitStack()


def _set_device(device: Any) -> None:
    guard.set_current_index(clocks.resolve(device).index)


@contextmanager
def _use_device(device: Any) -> Iterator[None]:
    previous = guard.current_index()
    _set_device(device)
    try:
        yield
    finally:
        guard.set_current_index(previous)


def _seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def _generator(device: Any) -> Generator:
    return default_generators[clocks.resolve(device).index]


# The functions of torch.cuda and torch.accelerator that are needed.
backend: Any = SimpleNamespace(
    is_on=False,
    is_available=lambda: backend.is_on,
    is_initialized=lambda: backend.is_on,
    device_count=lambda: COUNT if backend.is_on else 0,
    init=lambda: None,
    _is_in_bad_fork=lambda: False,
    Stream=clocks.Stream,
    Event=clocks.Event,
    stream=lambda stream: stream or nullcontext(),
    current_stream=clocks.current_stream,
    default_stream=clocks.default_stream,
    set_stream=clocks.set_stream,
    synchronize=clocks.synchronize,
    current_device=guard.current_index,
    set_device=_set_device,
    device=_use_device,
    CUDAGraph=graphs.Graph,
    graph=graphs.graph,
    graph_pool_handle=graphs.graph_pool_handle,
    is_current_stream_capturing=lambda: bool(recording.captures),
    default_generators=default_generators,
    manual_seed=lambda seed: _generator(None).manual_seed(seed),
    manual_seed_all=_seed_all,
    get_rng_state=lambda device=None: _generator(device).get_state(),
    set_rng_state=lambda state, device=None: _generator(device).set_state(state),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)
_accelerator = {
    "current_stream": clocks.current_stream,
    "set_stream": clocks.set_stream,
    "synchronize": clocks.synchronize,
    "memory_stats": lambda device=None: memory.read_stats(clocks.resolve(device).index),
    "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(clocks.resolve(device).index),
    "empty_cache": lambda: None,
}


def register() -> None:
    """Register the device in this process, switched off. Before the first backward pass."""
    if _libraries:
        return
    problem = guard.find_problem()
    if problem is not None:
        raise RuntimeError(f"no stand-in: {problem}")
    _device_constructors()  # torch keeps the list of its first call, which must not be of patches
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    guard.extend_guard()
    make_default_generators()
    _libraries.extend([*dispatch.register_ops(), *register_collectives()])


@contextmanager
def switched_on() -> Iterator[torch.device]:
    """Make the stand-in the accelerator of this process in a block."""
    register()
    torch_names = {"Stream": clocks.Stream, "Event": clocks.Event, "Generator": Generator}
    with ExitStack() as stack:
        for place, names in (
            (torch, torch_names | memory.make_factories()),
            (torch.accelerator, _accelerator),
            (torch.Tensor, {"is_pinned": memory.is_pinned, "pin_memory": memory.pin}),
            (torch.UntypedStorage, {"__new__": memory.new_storage}),
            (backend, {"is_on": True}),
        ):
            stack.enter_context(mock.patch.multiple(place, **names))
        for reset in (clocks.reset, lambda: guard.set_current_index(0)):
            reset()
            stack.callback(reset)
        yield torch.device(NAME, 0)


def switch_on(rank: int | None = None) -> torch.device:
    """Make the stand-in the accelerator of this process, and the device of a rank current."""
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    _forever.enter_context(switched_on())
    guard.set_current_index(rank % COUNT)
    return torch.device(NAME, rank % COUNT)
