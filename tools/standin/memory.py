"""Tensors of the stand-in share the CPU's memory: DLPack capsules whose device is rewritten."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import torch

NAME = "standin"
COUNT = 2

_current = [0] * COUNT
_peak = [0] * COUNT
_CPU, _EXTENSION = 1, 12  # DLDeviceType of DLPack
_DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)  # DLTensor: void* data, then int32 type and id
_capsule_pointer: Callable[..., Any] = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p  # type: ignore[attr-defined]
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]  # type: ignore[attr-defined]


def is_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the stand-in."""
    return tensor.device.type == NAME


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of a stand-in device that shares the memory of a CPU tensor."""
    made = _retag(tensor.detach().resolve_conj().resolve_neg(), _EXTENSION, index)
    storage = made.untyped_storage()
    num_bytes = storage.nbytes()
    _count(index, num_bytes)
    weakref.finalize(storage, _count, index, -num_bytes).atexit = False
    return made


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of a tensor of the stand-in."""
    with torch._C._DisableTorchDispatch():
        return _retag(tensor.detach() if tensor.requires_grad else tensor, _CPU, 0)


def read_stats(index: int) -> dict[str, int]:
    """Return the memory statistics of a device under torch's names."""
    return {
        "allocated_bytes.all.current": _current[index],
        "allocated_bytes.all.peak": _peak[index],
        "reserved_bytes.all.current": _current[index],
        "reserved_bytes.all.peak": _peak[index],
    }


def reset_peaks(index: int) -> None:
    """Count peaks from now."""
    _peak[index] = _current[index]


def _count(index: int, num_bytes: int) -> None:
    _current[index] += num_bytes
    _peak[index] = max(_peak[index], _current[index])


def _retag(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    address = _capsule_pointer(capsule, b"dltensor")
    device = ctypes.cast(address + _DEVICE_OFFSET, ctypes.POINTER(ctypes.c_int32))
    device[0], device[1] = kind, index
    retagged: torch.Tensor = torch._C._from_dlpack(capsule)
    return retagged
