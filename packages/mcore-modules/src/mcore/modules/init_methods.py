"""Functions that fill a weight from a normal distribution, in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Integral, Real

import torch


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, sigma).

    Args:
        sigma: The standard deviation, >= 0.

    Returns:
        A picklable ``f(tensor)`` that writes in place and returns the tensor. Any shape (also
        empty), floating dtype and device (also meta). It draws from the default generator of the
        tensor's device. ``f.keywords["std"]`` is the standard deviation.

    Raises:
        ValueError: ``sigma`` is negative, not finite or not a number.

    Example:
        >>> import torch
        >>> weight = torch.empty(2, 3)
        >>> init_method_normal(0.02)(weight) is weight
        True
    """
    return _fill_from_normal(_check_std(sigma))


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that fills a tensor from N(0, sigma / sqrt(multiplier * num_layers)).

    For the layers that write to the residual stream. The default multiplier is for two of them in
    a transformer layer and keeps the stream's variance independent of the depth (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", section 2.3).

    Args:
        sigma: The standard deviation before scaling, >= 0.
        num_layers: The number of transformer layers, >= 1.
        multiplier: Residual branches per layer, > 0.

    Returns:
        As for :func:`init_method_normal`.

    Raises:
        ValueError: An argument is out of range or not a number.

    Example:
        >>> scaled_init_method_normal(0.02, 8).keywords["std"]
        0.005
    """
    return _fill_from_normal(_scale_std(sigma, num_layers, multiplier))


def mup_scaled_init_method_normal(
    sigma: float, num_layers: int, width_mult: float, multiplier: float = 2.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function like :func:`scaled_init_method_normal` for maximal update parametrisation.

    The standard deviation is ``sigma / sqrt(multiplier * num_layers * width_mult)`` (Yang et al.,
    "Tensor Programs V", table 8: hidden weights shrink with the root of the width).

    Args:
        sigma: The standard deviation of the base model, >= 0.
        num_layers: The number of transformer layers, >= 1.
        width_mult: Width of this model divided by that of the base model, > 0.
        multiplier: Residual branches per layer, > 0.

    Returns:
        As for :func:`init_method_normal`.

    Raises:
        ValueError: An argument is out of range or not a number.

    Example:
        >>> mup_scaled_init_method_normal(0.02, 2, width_mult=4.0).keywords["std"]
        0.005
    """
    std = _scale_std(sigma, num_layers, multiplier)
    return _fill_from_normal(std / math.sqrt(_check_positive("width_mult", width_mult)))


def _fill_from_normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=std)


def _scale_std(sigma: float, num_layers: int, multiplier: float) -> float:
    if not isinstance(num_layers, Integral) or isinstance(num_layers, bool) or num_layers < 1:
        raise ValueError(f"num_layers is {num_layers!r}. Pass a whole number >= 1")
    return _check_std(sigma) / math.sqrt(_check_positive("multiplier", multiplier) * num_layers)


def _check_std(sigma: float) -> float:
    if not _is_finite_number(sigma) or sigma < 0:
        raise ValueError(f"sigma is {sigma!r}. Pass a finite standard deviation >= 0")
    return float(sigma)


def _check_positive(name: str, value: float) -> float:
    if not _is_finite_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}. Pass a finite number > 0")
    return float(value)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
