"""Whether a tensor made now is real: only a real one may be kept for later calls."""

from __future__ import annotations

import torch

from mcore.tensor.device import resolve_device

__all__ = ["is_transform_wrapper", "traced_device"]

_META = torch.device("meta")


def traced_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device of a new tensor if it would have no memory, because it is only traced.

    That is so while a `FakeTensorMode` is active, and while `meta` is the default device, as within
    `with torch.device("meta"):`, unless another device is asked for.

    Args:
        device: The device asked for, or `None`.

    Returns:
        The device on which to make a tensor that must not be kept; `None` if tensors are real.

    Example:
        >>> traced_device(None) is None
        True
        >>> with torch.device("meta"):
        ...     traced_device(None)
        device(type='meta')
    """
    num_function_modes = torch._C._len_torch_function_stack()
    if num_function_modes == 0 and torch._C._len_torch_dispatch_stack() == 0:
        return None
    if device is None and num_function_modes and torch.get_default_device() == _META:
        return _META
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return resolve_device(device)
    return None


def is_transform_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made inside a `torch.func` transform and dies with it.

    Args:
        tensor: Any tensor.

    Returns:
        Whether it is the wrapper that a transform such as `torch.func.grad` puts around tensors.

    Example:
        >>> is_transform_wrapper(torch.ones(2))
        False
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
