"""Checks of the shapes that callers pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

__all__ = ["checked_shape"]


def checked_shape(tensor_shape: Sequence[int] | int) -> tuple[int, ...]:
    """Return a shape as a tuple of integers.

    Args:
        tensor_shape: A sequence of integers, `torch.Size` included, or one integer.

    Returns:
        The shape; a symbolic size stays symbolic.

    Raises:
        TypeError: Something in it is no integer.
        ValueError: An entry is negative.

    Example:
        >>> checked_shape(torch.Size([2, 3])), checked_shape(4)
        ((2, 3), (4,))
    """
    entries = (tensor_shape,) if isinstance(tensor_shape, int) else tensor_shape
    try:
        if isinstance(entries, torch.Tensor):
            raise TypeError("a tensor would have to be read")
        shape = tuple(n if isinstance(n, torch.SymInt) else operator.index(n) for n in entries)
    except TypeError as error:
        raise TypeError(
            "tensor_shape must be an integer or a sequence of integers, "
            f"got {type(tensor_shape).__name__} {tensor_shape!r}"
        ) from error
    if any(n < 0 for n in shape):
        raise ValueError(f"tensor_shape must not have negative entries, got {shape}")
    return shape
