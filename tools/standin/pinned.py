"""Page-locked memory of the host, as far as copies and captures can notice it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from standin import recording

_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "arange", "tensor", "empty_like",
    "zeros_like", "ones_like", "empty_strided",
)  # fmt: skip
_ranges: dict[int, int] = {}


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Return whether a tensor's memory is pinned."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() in _ranges


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a pinned copy of a CPU tensor, or the tensor if it is pinned."""
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else _mark(tensor.clone())


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    recording.refuse_in_capture("an allocation of pinned memory")
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _ranges[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, _ranges.pop, storage.data_ptr(), None)
    return tensor


def make_factories() -> dict[str, Callable[..., torch.Tensor]]:
    """Return torch's functions that accept ``pin_memory``, by name, each of which can pin."""
    return {name: _wrap(getattr(torch, name)) for name in _FACTORIES}


def _wrap(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = factory(*args, **kwargs)
        if pin_memory and made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return _mark(made) if pin_memory else made

    return make
