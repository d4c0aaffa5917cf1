"""The current device (the accelerator in use, else the CPU), and whether tensors are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CPU = torch.device("cpu")
_META = torch.device("meta")


def available_accelerator() -> torch.device | None:
    """Return the current accelerator with its index, None if none is available."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of the first tensor, the current device if there are none."""
    first = next(iter(tensors), None)
    return current_device() if first is None else first.device


def current_device() -> torch.device:
    """Return the device on which this package allocates by default.

    Returns:
        The current accelerator with its index if an accelerator is available, else the CPU. It is
        looked up at every call, so it follows ``torch.accelerator.set_device_index``.

    Example:
        >>> current_device().type == "cpu" or torch.accelerator.is_available()
        True
    """
    return available_accelerator() or _CPU


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that an argument means, complete with its index.

    Args:
        device: A device, its name, the index of an accelerator, or None for the current device.
            An accelerator without an index means its current index.

    Returns:
        A device with an index, which identifies one memory and can be part of a key.

    Raises:
        ValueError: An index was given and there is no accelerator.
        RuntimeError: From torch: there is no such device type.

    Example:
        >>> resolve_device("cpu:0")
        device(type='cpu')
    """
    if device is None:
        return current_device()
    if isinstance(device, int):
        current = current_device()
        if current == _CPU:
            raise ValueError(
                f"device {device} is the index of an accelerator and none is available: "
                "pass 'cpu', or None for the current device"
            )
        return torch.device(current.type, device)
    named = torch.device(device)
    if named.type == "cpu":
        return _CPU
    if named.index is None:
        current = current_device()
        return current if current.type == named.type else named
    return named


def capture_query(device: torch.device) -> Callable[[], bool]:
    """Return a function that tells whether a graph is captured on the device's current stream."""
    # Devices whose module lacks this query capture no graphs. Another device's raises an error.
    query: Callable[[], bool] = getattr(
        torch.get_device_module(device), "is_current_stream_capturing", lambda: False
    )
    return query


def traced_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device of a new tensor if it would be traced and have no memory, else None.

    It is traced in a ``FakeTensorMode``, and if ``meta`` is the default and no device is given.
    """
    num_function_modes = torch._C._len_torch_function_stack()
    if num_function_modes == 0 and torch._C._len_torch_dispatch_stack() == 0:
        return None
    if device is None and num_function_modes and torch.get_default_device() == _META:
        return _META
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return resolve_device(device)
    return None


def are_traced(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors are being compiled, fake or in a ``torch.func`` transform."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(issubclass(kind, FakeTensor) for kind in set(map(type, tensors)))


def is_transform_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a ``torch.func`` transform and is invalid after it."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
