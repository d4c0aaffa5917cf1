"""Memory of the stand-in, which is the CPU's, and page-locked memory of the host.

A tensor of the stand-in shares memory with one of the CPU: a DLPack capsule whose device is
rewritten. Memory is page-locked as far as copies and captures can notice it.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from standin import recording

NAME = "standin"
COUNT = 2

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "empty_like")  # with pin_memory=
_pinned: dict[int, None] = {}
_resized: dict[int, int] = {}  # address of a storage -> its size, which fully_shard changes
_current = [0] * COUNT
_peak = [0] * COUNT
_CPU, _EXTENSION = 1, 12  # DLDeviceType of DLPack
_DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)  # DLTensor: void* data, then int32 type and id
_capsule_pointer: Callable[..., Any] = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p  # type: ignore[attr-defined]
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]  # type: ignore[attr-defined]


def is_device(value: object) -> bool:
    """Return whether a value is a tensor of the stand-in."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of a stand-in device that shares the memory of a CPU tensor."""
    made = _retag(tensor.detach().resolve_conj().resolve_neg(), _EXTENSION, index)
    storage = made.untyped_storage()
    _count(index, storage.nbytes())
    weakref.finalize(storage, _count, index, -storage.nbytes()).atexit = False
    return made


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of a tensor, or the tensor of the CPU."""
    if not is_device(tensor):
        return tensor
    with torch._C._DisableTorchDispatch():
        return _retag(tensor.detach() if tensor.requires_grad else tensor, _CPU, 0)


def read_stats(index: int) -> dict[str, int]:
    """Return the memory statistics of a device under torch's names."""
    return {
        f"{kind}_bytes.all.{name}": numbers[index]
        for kind in ("allocated", "reserved")
        for name, numbers in (("current", _current), ("peak", _peak))
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


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Make a ``torch.UntypedStorage``: torch has no allocator for the stand-in."""
    if device is not None and torch.device(device).type == NAME:
        return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()
    make: Any = torch._C.StorageBase.__new__
    return make(cls, *args, device=device, **kwargs)


def _size_of(storage: torch.UntypedStorage) -> int:
    return _resized.get(storage.data_ptr(), storage.nbytes())


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Free a storage, whose content becomes poison, or allocate a freed one again."""
    if storage.device.type != NAME:
        return torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined, no-any-return]
    address, whole = storage.data_ptr(), storage.nbytes()
    if size not in (0, whole):
        raise RuntimeError(f"{NAME} has no storage that grows: it has {whole} bytes, not {size}")
    if size == 0:
        ctypes.memset(address, 0xFF, whole)
    if address not in _resized:
        weakref.finalize(storage, _resized.pop, address, None)
    _resized[address] = size
    return storage


STORAGE = {"__new__": _new_storage, "resize_": _resize, "size": _size_of}


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Return whether a tensor's memory is pinned."""
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_plain and tensor.untyped_storage().data_ptr() in _pinned


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a pinned copy of a CPU tensor, or the tensor if it is pinned."""
    return tensor if is_pinned(tensor) else _mark(tensor.clone())


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    recording.refuse_in_capture("an allocation of pinned memory")
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    storage = tensor.untyped_storage()
    if storage.nbytes():
        _pinned[storage.data_ptr()] = None
        weakref.finalize(storage, _pinned.pop, storage.data_ptr(), None)
    return tensor


def make_factories() -> dict[str, Callable[..., torch.Tensor]]:
    """Return torch's functions that accept ``pin_memory``, by name, each of which can pin."""
    return {name: functools.partial(_make, getattr(torch, name)) for name in _FACTORIES}


def _make(factory: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = factory(*args, **kwargs)
    return _mark(made) if pin_memory else made
