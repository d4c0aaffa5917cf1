"""Turns what a caller logs into Python numbers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch

from mcore.observe.host_reads import as_number, read_scalars

__all__ = ["plain_numbers"]

logger = logging.getLogger(__name__)


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python numbers, which every tracker takes.

    Tensors are read in one transfer for each device. None is left out; what is no number is left
    out with one WARNING for each name. NaN and infinities stay.

    Args:
        metrics: Numbers, NumPy numbers and tensors with one element, by name.

    Returns:
        Ints and floats by name, in the same order.

    Example:
        >>> plain_numbers({"lm loss": torch.tensor(2.5), "zeros": 3, "nothing": None})
        {'lm loss': 2.5, 'zeros': 3}
    """
    if all(type(value) in (float, int) for value in metrics.values()):
        return dict(metrics)
    readable = {}
    for name, value in metrics.items():
        if _is_readable(value):
            readable[name] = value
        elif value is not None:
            _warn_left_out(name, type(value).__name__)
    return read_scalars(readable)


def _is_readable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, bool) or as_number(value) is not None


@functools.lru_cache(maxsize=1024)
def _warn_left_out(name: str, kind: str) -> None:
    logger.warning("%r is no number but a %s and is not logged; give one number", name, kind)
