"""The current device of each thread, also for torch's C++.

``torch.utils.backend_registration`` makes a guard for devices in Python. Its methods in C++ return
device 0 of one. The vtable of that guard is replaced by a copy with two devices.
"""

import ctypes
import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from standin.memory import COUNT, NAME

_HEADER = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_PRIVATE_USE_1 = 20  # c10::DeviceType
# Not threading.local: it forgets a thread of autograd between two calls.
_current: dict[int, int] = {}
_keep: list[Any] = []
_errors: list[BaseException] = []
# Bound once: a lookup in a class, while an error is set, clears it or fails if it is not cached.
_raise_error = ctypes.pythonapi.PyErr_Occurred


def current_index() -> int:
    """Return the index of the current device of this thread."""
    return _current.get(threading.get_ident(), 0)


def set_current_index(index: int) -> None:
    """Make a device current in this thread."""
    if not 0 <= index < COUNT:
        raise RuntimeError(f"invalid device ordinal: {index}, there are {COUNT} devices")
    _current[threading.get_ident()] = index


class DeviceGuard(getattr(backend_registration, "_DummyDeviceGuard", object)):  # type: ignore[misc]
    """The guard of torch. Its methods in C++ call this one, also while an error ends a backward."""

    def type_(self) -> Any:
        """Return the type of the device, and keep an error that torch has set for later.

        A hook of saved tensors that fails, as a recomputation does, leaves it set. Then a result
        of Python is an error in a destructor, which would abort the process.
        """
        try:
            _raise_error()
        except BaseException as error:
            _errors.append(error)
        return super().type_()


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """Run torch's backward, and raise the error that the guard has kept from it."""
    try:
        return torch.autograd.graph._engine_run_backward(*args, **kwargs)
    except SystemError as error:
        raise (_errors.pop() if _errors else error) from None


def extend_guard() -> None:
    """Give the registered guard ``COUNT`` devices, one of which is current in each thread."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = ctypes.cast(ctypes.addressof(ctypes.c_char.in_dll(c10, _REGISTRY)), _POINTERS)
    guard = ctypes.cast(registry[_PRIVATE_USE_1], _POINTERS)
    slots = _read_slots()
    # Two entries before the first slot describe the type, two after the last are destructors.
    size = ctypes.sizeof(ctypes.c_void_p)
    old = ctypes.cast(guard[0] - 2 * size, _POINTERS)
    table = (ctypes.c_void_p * (len(slots) + 4))(*(old[i] for i in range(len(slots) + 4)))
    for name, function in _METHODS.items():
        table[2 + slots.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
    _keep.append(table)
    guard[0] = ctypes.addressof(table) + 2 * size


def _read_slots() -> list[str]:
    """Return the virtual methods of a guard in the order of their declaration."""
    body = _HEADER.read_text().partition("struct C10_API DeviceGuardImplInterface")[2]
    body = body.partition("virtual ~DeviceGuardImplInterface")[0]
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", body, flags=re.DOTALL)
    return re.findall(r"virtual [\w:*\s]*?(\w+)\(", body)


def find_problem() -> str | None:
    """Return why this torch cannot have the stand-in, None if it can."""
    has_devices = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    if not has_devices or not _HEADER.exists() or not set(_METHODS) <= set(_read_slots()):
        return f"torch {torch.__version__} has no devices written in Python"
    # The stand-in itself is the accelerator once it is registered.
    if torch._C._get_accelerator().type not in ("cpu", NAME) or torch.version.cuda is not None:
        return "torch has another accelerator"
    return None


_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_THIS = ctypes.c_void_p
_DEVICE = ctypes.c_uint16  # c10::Device: two bytes, type and index


def _pack(index: int) -> int:
    return _PRIVATE_USE_1 | index << 8


def _exchange(_: int, device: int) -> int:
    previous = current_index()
    # Without a frame it is autograd, which enters each node's stream. Torch's guard has them on 0.
    if sys._getframe().f_back is not None:
        _select(_, device)
    return _pack(previous)


def _select(_: int, device: int) -> None:
    index = device >> 8
    if index < COUNT:  # 255 means none
        _current[threading.get_ident()] = index


_METHODS = {
    "exchangeDevice": ctypes.CFUNCTYPE(_DEVICE, _THIS, _DEVICE)(_exchange),
    "getDevice": ctypes.CFUNCTYPE(_DEVICE, _THIS)(lambda _: _pack(current_index())),
    "setDevice": ctypes.CFUNCTYPE(None, _THIS, _DEVICE)(_select),
    "uncheckedSetDevice": ctypes.CFUNCTYPE(None, _THIS, _DEVICE)(_select),
    "deviceCount": ctypes.CFUNCTYPE(ctypes.c_int8, _THIS)(lambda _: COUNT),
}
