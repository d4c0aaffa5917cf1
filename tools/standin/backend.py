"""The device in torch: the module ``torch.standin``, and the functions of ``torch.accelerator``."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

from standin import clocks, dispatch, graphs, guard, memory, recording
from standin.collectives import register_collectives
from standin.generators import Generator, default_generators
from standin.memory import COUNT, NAME

_libraries: list[Any] = []
_forever = ExitStack()


def _generator(device: Any = None) -> Generator:
    return default_generators[clocks.resolve(device).index]


_STREAMS = {"Stream": clocks.Stream, "Event": clocks.Event}
# The functions of torch.accelerator and torch.cuda that are needed.
_ACCELERATOR = {
    "current_stream": clocks.current_stream,
    "synchronize": clocks.synchronize,
    "memory_stats": lambda device=None: memory.read_stats(clocks.resolve(device).index),
    "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(clocks.resolve(device).index),
}
backend: Any = SimpleNamespace(
    **_STREAMS,
    **_ACCELERATOR,
    is_on=False,
    is_initialized=lambda: backend.is_on,
    is_available=lambda: backend.is_on,
    device_count=lambda: COUNT if backend.is_on else 0,
    _is_in_bad_fork=lambda: False,
    current_device=guard.current_index,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: NAME,
    get_device_properties=lambda device=None: SimpleNamespace(name=NAME, total_memory=1 << 30),
    set_device=lambda device: guard.set_current_index(clocks.resolve(device).index),
    stream=lambda stream: stream,
    device=lambda device: torch.accelerator.device_index(clocks.resolve(device).index),
    CUDAGraph=graphs.Graph,
    graph=graphs.graph,
    graph_pool_handle=lambda: (0, next(graphs.numbers)),
    is_current_stream_capturing=lambda: bool(recording.captures),
    default_generators=default_generators,
    manual_seed_all=lambda seed: [one.manual_seed(seed) for one in default_generators],
    get_rng_state=lambda device=None: _generator(device).get_state(),
    set_rng_state=lambda state, device=None: _generator(device).set_state(state),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)


def register() -> None:
    """Register the device in this process, switched off. Before the first backward pass."""
    if _libraries:
        return
    problem = guard.find_problem()
    if problem is not None:
        raise RuntimeError(f"no stand-in: {problem}")
    _device_constructors()  # torch keeps the list of its first call, which must not be of patches
    setup: Any = backend_registration._setup_privateuseone_for_python_backend
    setup(NAME, backend_module=backend, device_guard=guard.DeviceGuard())
    guard.extend_guard()
    default_generators[:] = [Generator(torch.device(NAME, index)) for index in range(COUNT)]
    _libraries.extend([*dispatch.register_ops(), *register_collectives()])


@contextmanager
def switched_on() -> Iterator[torch.device]:
    """Make the stand-in the accelerator of this process in a block."""
    register()
    patches: dict[Any, dict[str, Any]] = {
        torch: {**_STREAMS, "Generator": Generator, **memory.make_factories()},
        torch.accelerator: _ACCELERATOR,
        torch.autograd: {"_engine_run_backward": guard.run_backward},
        torch.Tensor: {"is_pinned": memory.is_pinned, "pin_memory": memory.pin},
        torch.UntypedStorage: memory.STORAGE,
    }
    with ExitStack() as stack:
        for place, names in patches.items():
            stack.enter_context(mock.patch.multiple(place, **names))
        stack.enter_context(mock.patch.object(backend, "is_on", new=True))
        for reset in (clocks.reset, lambda: guard.set_current_index(0), _reset_compiler):
            reset()
            stack.callback(reset)
        yield torch.device(NAME, 0)


def _reset_compiler() -> None:
    """Make torch.compile read torch's functions anew: it keeps the table of its first call."""
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()


def switch_on(rank: int | None = None) -> torch.device:
    """Make the stand-in the accelerator of this process, and the device of a rank current."""
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    _forever.enter_context(switched_on())
    guard.set_current_index(rank % COUNT)
    return torch.device(NAME, rank % COUNT)
