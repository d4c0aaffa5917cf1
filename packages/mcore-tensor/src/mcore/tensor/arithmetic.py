"""Integer arithmetic on sizes and concatenation of optional tensors."""

from __future__ import annotations

import operator
from typing import Literal, SupportsIndex, overload

import torch
from torch import Tensor


class DivisibilityError(ValueError, AssertionError):
    """An integer is not divisible by another integer.

    Both a ``ValueError`` and an ``AssertionError``: callers written for Megatron-LM catch the
    latter.
    """


def _convert_to_integer(value: SupportsIndex | torch.SymInt, name: str) -> int:
    if isinstance(value, (int, torch.SymInt)):  # a SymInt stays symbolic: no guard, no constant
        return value  # type: ignore[return-value]
    if not isinstance(value, Tensor):  # a tensor has __index__ too, but reading it waits for a GPU
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(
        f"{name} must be an integer, got {type(value).__name__}: convert it with int() first"
    )


def ensure_divisibility(
    numerator: SupportsIndex | torch.SymInt, denominator: SupportsIndex | torch.SymInt
) -> None:
    """Raise unless ``numerator`` is a multiple of ``denominator``, under ``python -O`` too.

    Args:
        numerator: An integer: ``int``, NumPy integer or ``torch.SymInt``.
        denominator: An integer other than zero.

    Raises:
        DivisibilityError: ``numerator`` is not a multiple. Both ``except ValueError`` and
            ``except AssertionError`` catch it.
        ZeroDivisionError: ``denominator`` is zero.
        TypeError: One of the two is not an integer (a float or a tensor, for example).

    Example:
        >>> ensure_divisibility(8, 2)
        >>> try:
        ...     ensure_divisibility(4, 5)
        ... except ValueError as error:
        ...     print(error)
        4 is not divisible by 5
    """
    divide(numerator, denominator)


def divide(
    numerator: SupportsIndex | torch.SymInt, denominator: SupportsIndex | torch.SymInt
) -> int:
    """Return the exact quotient of two integers.

    Args:
        numerator: An integer: ``int``, NumPy integer or ``torch.SymInt``.
        denominator: An integer other than zero.

    Returns:
        ``numerator // denominator``, which has no remainder. A ``torch.SymInt`` if one of the two
        is symbolic, else an ``int``.

    Raises:
        DivisibilityError: ``numerator`` is not a multiple of ``denominator``.
        ZeroDivisionError: ``denominator`` is zero.
        TypeError: One of the two is not an integer (a float or a tensor, for example).

    Example:
        >>> divide(8, 2)
        4
        >>> divide(-4, 2)
        -2
    """
    if not (isinstance(numerator, int) and isinstance(denominator, int)):
        numerator = _convert_to_integer(numerator, "numerator")
        denominator = _convert_to_integer(denominator, "denominator")
    if numerator % denominator != 0:
        raise DivisibilityError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def round_up_to_nearest_multiple(
    value: SupportsIndex | torch.SymInt, multiple: SupportsIndex | torch.SymInt
) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``.

    The arithmetic is on integers, so it is exact at any size, beyond ``2**53`` as well.

    Args:
        value: An integer, of either sign.
        multiple: A positive integer.

    Returns:
        The multiple. ``value`` itself if it is a multiple.

    Raises:
        ValueError: ``multiple`` is not positive.
        TypeError: One of the two is not an integer.

    Example:
        >>> round_up_to_nearest_multiple(50257, 128)
        50304
    """
    number = _convert_to_integer(value, "value")
    step = _convert_to_integer(multiple, "multiple")
    if step <= 0:
        raise ValueError(f"multiple must be positive, got {step}")
    return -(-number // step) * step


@overload
def maybe_cat(a: Tensor, b: Tensor | None, dim: int = 0, *, required: bool = False) -> Tensor: ...
@overload
def maybe_cat(a: Tensor | None, b: Tensor, dim: int = 0, *, required: bool = False) -> Tensor: ...
@overload
def maybe_cat(
    a: Tensor | None, b: Tensor | None, dim: int = 0, *, required: Literal[True]
) -> Tensor: ...
@overload
def maybe_cat(
    a: Tensor | None, b: Tensor | None, dim: int = 0, *, required: bool = False
) -> Tensor | None: ...
def maybe_cat(
    a: Tensor | None, b: Tensor | None, dim: int = 0, *, required: bool = False
) -> Tensor | None:
    """Concatenate two tensors, either of which may be None.

    An empty tensor is not None and is concatenated.

    Args:
        a: The first tensor, or None.
        b: The second tensor, or None. The same shape as ``a`` except along ``dim``.
        dim: The dimension along which to concatenate.
        required: Whether at least one of the two must be given.

    Returns:
        ``torch.cat((a, b), dim)`` if both are given, the given tensor (the same object, no copy)
        if only one is, None if none is.

    Raises:
        ValueError: None is given and ``required`` is true.

    Example:
        >>> maybe_cat(torch.ones(2, 3), torch.ones(2, 1), dim=1).shape
        torch.Size([2, 4])
        >>> maybe_cat(None, None) is None
        True
    """
    if a is not None and b is not None:
        return torch.cat((a, b), dim)
    given = b if a is None else a
    if given is None and required:
        raise ValueError("a and b are both None: pass at least one of them, or pass required=False")
    return given
