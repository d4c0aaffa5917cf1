"""Import it before megatron-core: what it asks of CUDA is answered for the CPU."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Calls that name a CUDA device get the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:  # a name, such as torch.FloatTensor
            return str(func(*args)).replace("torch.", "torch.cuda.")
        if isinstance(kwargs.get("device"), int) or _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return func(*(CPU if _is_cuda(each) else each for each in args), **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


class _Stream:
    """One stream on which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


_ANSWERS = {
    "current_device": lambda: "cpu",  # in backward the mode above is off
    "device_count": lambda: 1,
    "set_device": lambda *_, **__: None,
    "synchronize": lambda *_, **__: None,
    "empty_cache": lambda *_, **__: None,
    "_lazy_init": lambda *_, **__: None,
    "_lazy_call": lambda call, **_: call(),
    "default_generators": dict.fromkeys((0, "cpu"), torch.default_generator),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "get_device_properties": lambda *_: type("Properties", (), {"major": 8, "minor": 0}),
    "get_device_capability": lambda *_: (8, 0),
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda *_: contextlib.nullcontext(),
    "device": lambda *_: contextlib.nullcontext(),
    "current_stream": lambda *_: _Stream(),
    "default_stream": lambda *_: _Stream(),
}
for _name, _answer in _ANSWERS.items():
    setattr(torch.cuda, _name, _answer)
torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]
torch.compile = lambda model=None, **_: model if callable(model) else (lambda given: given)  # type: ignore[assignment]
_OnCpu().__enter__()
