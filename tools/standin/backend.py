"""The device in torch: the module ``torch.standin``, and the functions of ``torch.accelerator``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

from standin import clocks, dispatch, graphs, guard, pinned
from standin.collectives import register_collectives
from standin.generators import Generator, default_generators, make_default_generators
from standin.memory import COUNT, NAME, read_stats, reset_peaks


class Backend:
    """The module ``torch.standin``, with the functions of ``torch.cuda`` that are needed."""

    Stream = clocks.Stream
    Event = clocks.Event
    default_generators = default_generators
    current_stream = staticmethod(clocks.current_stream)
    default_stream = staticmethod(clocks.default_stream)
    set_stream = staticmethod(clocks.set_stream)
    synchronize = staticmethod(clocks.synchronize)
    current_device = staticmethod(guard.current_index)
    CUDAGraph = graphs.Graph
    graph = staticmethod(graphs.graph)
    graph_pool_handle = staticmethod(graphs.graph_pool_handle)
    is_on = False

    def is_available(self) -> bool:
        """Return whether the device is switched on."""
        return self.is_on

    is_initialized = is_available

    def device_count(self) -> int:
        """Return the number of devices, 0 while they are switched off."""
        return COUNT if self.is_on else 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return graphs.find_capture() is not None

    def init(self) -> None:
        """Do nothing."""

    def set_device(self, device: Any) -> None:
        """Make a device current."""
        guard.set_current_index(clocks.resolve(device).index)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Make a device current in a block."""
        previous = guard.current_index()
        self.set_device(device)
        try:
            yield
        finally:
            guard.set_current_index(previous)

    @contextmanager
    def stream(self, stream: clocks.Stream | None) -> Iterator[None]:
        """Make a stream current in a block."""
        if stream is None:
            yield
            return
        with stream:
            yield

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        default_generators[guard.current_index()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for generator in default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of a device's generator."""
        return default_generators[clocks.resolve(device).index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of a device's generator."""
        default_generators[clocks.resolve(device).index].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the formats of autocast."""
        return [torch.float16, torch.bfloat16]

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return allocated bytes, and their peak."""
        return read_stats(clocks.resolve(device).index)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Count peaks from now."""
        reset_peaks(clocks.resolve(device).index)

    def memory_allocated(self, device: Any = None) -> int:
        """Return allocated bytes."""
        return self.memory_stats(device)["allocated_bytes.all.current"]

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak of allocated bytes."""
        return self.memory_stats(device)["allocated_bytes.all.peak"]

    def empty_cache(self) -> None:
        """Do nothing."""


backend = Backend()
_forever = ExitStack()
_libraries: list[Any] = []


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
    guard.install_allocator()
    make_default_generators()
    _libraries.extend([*dispatch.register_ops(), *register_collectives()])


@contextmanager
def switched_on() -> Iterator[torch.device]:
    """Make the stand-in the accelerator of this process in a block."""
    register()
    accelerator = (
        "current_stream", "set_stream", "synchronize", "memory_stats", "reset_peak_memory_stats",
        "memory_allocated", "max_memory_allocated", "empty_cache",
    )  # fmt: skip
    namespaces: dict[Any, dict[str, Any]] = {
        torch: {
            "Stream": clocks.Stream,
            "Event": clocks.Event,
            "Generator": Generator,
            **pinned.make_factories(),
        },
        torch.accelerator: {name: getattr(backend, name) for name in accelerator},
        torch.Tensor: {"is_pinned": pinned.is_pinned, "pin_memory": pinned.pin},
    }
    patches = [mock.patch.multiple(place, **names) for place, names in namespaces.items()]
    for patch in patches:
        patch.start()
    backend.is_on = True
    clocks.reset()
    guard.set_current_index(0)
    try:
        yield torch.device(NAME, 0)
    finally:
        backend.is_on = False
        for patch in reversed(patches):
            patch.stop()
        clocks.reset()
        guard.set_current_index(0)


def switch_on(rank: int | None = None) -> torch.device:
    """Make the stand-in the accelerator of this process, and the device of a rank current."""
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    _forever.enter_context(switched_on())
    guard.set_current_index(rank % COUNT)
    return torch.device(NAME, rank % COUNT)
