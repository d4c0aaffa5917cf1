"""A call of a layer, split into the tensors that a graph takes and the values baked into it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from mcore.modules.graphs.signatures import signature_of

__all__ = ["LocalCall"]

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    enum.Enum,
)


class LocalCall:
    """The arguments of one call.

    Args:
        args: Positional arguments: tensors and constants.
        kwargs: Keyword arguments: tensors and constants.

    Raises:
        TypeError: An argument is neither a tensor nor a constant, which is None, a number, a
            string, a dtype, a device, a shape, an enum member, or a tuple of these.

    Example:
        >>> import torch
        >>> call = LocalCall((torch.ones(2), 3), {"scale": 2.0})
        >>> len(call.tensors), call.key == LocalCall((torch.zeros(2), 3), {"scale": 2.0}).key
        (1, True)
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        self.tensors = tuple(value for value in args if isinstance(value, torch.Tensor))
        self.named_tensors = {
            name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)
        }
        self.key: Hashable = (
            tuple(_key_of(f"argument {index}", value) for index, value in enumerate(args)),
            tuple((name, _key_of(f"argument {name!r}", kwargs[name])) for name in sorted(kwargs)),
        )

    def bound_to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with the constants of this call in it, taking the tensors only."""
        # Without the tensors of this call, which a graph would keep alive.
        slots = [_SLOT if isinstance(value, torch.Tensor) else value for value in self._args]
        constants = {
            name: value for name, value in self._kwargs.items() if name not in self.named_tensors
        }

        def bound(*tensors: torch.Tensor, **named_tensors: torch.Tensor) -> Any:
            remaining = iter(tensors)
            args = [next(remaining) if value is _SLOT else value for value in slots]
            return function(*args, **constants, **named_tensors)

        return bound


_SLOT = object()


def _key_of(place: str, value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return signature_of(value)
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # 0.0 equals -0.0, and nan not even itself
    if isinstance(value, _CONSTANTS):
        return type(value), value
    if type(value) is tuple:
        return tuple(_key_of(place, item) for item in value if _refuse_tensor(place, item))
    raise TypeError(f"{place} is a {type(value).__name__}, neither a tensor nor a constant")


def _refuse_tensor(place: str, item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        raise TypeError(f"{place} is a tuple with a tensor in it; only plain tensors are captured")
    return True
