"""The scalars of a step: collected, then copied from devices to the host in one transfer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any, TypeVar

import torch

from mcore.observe.rank_logging import warn_once
from mcore.tensor.dtensor import is_dtensor

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Name = TypeVar("_Name")
_LARGEST = int(sys.float_info.max)
# Marks the keys of collected scalars, so they differ from every key that a caller can pass.
_COLLECTED = object()


def as_number(value: object) -> float | int | None:
    """Return a Python or NumPy number as a Python number. Booleans and other types give None."""
    if type(value) in (int, float):  # nearly all values. The test below takes ten times as long
        return value  # type: ignore[return-value]
    if value is None or isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if hasattr(value, "__index__") else float(value)


def is_one_number(value: object) -> bool:
    """Return whether a value is a number, or a readable real tensor of one element."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        is_real = not value.is_complex() and not is_dtensor(value)
        return value.numel() == 1 and is_plain and is_real
    if type(value) is int:
        return abs(value) <= _LARGEST
    return isinstance(value, bool) or as_number(value) is not None


def one_number(name: Any, value: Any, *, warns: bool = True) -> Any:
    """Return a value that is one number. Others give None, with one WARNING for each name.

    Tensors are returned as they are, a DTensor that every rank has whole as its plain tensor. A
    NumPy array of one element becomes its number.
    """
    if value is None or is_one_number(value):
        return value
    if is_dtensor(value) and all(place.is_replicate() for place in value.placements):
        return one_number(name, value.to_local(), warns=warns)
    if not isinstance(value, torch.Tensor) and getattr(value, "size", None) == 1:
        found = value.item() if callable(getattr(value, "item", None)) else None
        if found is not None and is_one_number(found):
            return found
    if warns:
        kind = type(value).__name__
        text = "an int too large for a float" if kind == "int" else f"not a number but a {kind}"
        warn_once(logger, "%r is %s and is not logged; give one number", as_name(name), text)
    return None


def as_name(name: object) -> str:
    """Return the name of a value as text that can be written to any file."""
    text = name if isinstance(name, str) else str(name)
    # A lone surrogate cannot be encoded: it becomes "?".
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def only_numbers(values: Mapping[str, Any], *, warns: bool = True) -> dict[str, Any]:
    """Return the values that are one number each. :func:`one_number` drops the others."""
    return {
        name: number
        for name, value in values.items()
        if (number := one_number(name, value, warns=warns)) is not None
    }


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_scalars(values: Mapping[_Key, object]) -> dict[_Key, float | int]:
    """Read numbers and one-element tensors, with one transfer for each device.

    Integers and integer tensors become ints, all other values floats. Keys and order stay.
    """
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    numbers: dict[_Key, float | int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        # A stack of one dtype is one kernel for all its scalars, without a conversion of each.
        by_dtype: dict[torch.dtype, list[_Key]] = {}
        for key, tensor in tensors.items():
            if tensor.device == device:
                by_dtype.setdefault(tensor.dtype, []).append(key)
        stacks = [
            torch.stack([tensors[key].detach().reshape(()) for key in keys])
            for keys in by_dtype.values()
        ]
        order = list(chain.from_iterable(by_dtype.values()))
        if len(stacks) == 1:
            joined = stacks[0].to(widest_float(device))
        else:
            joined = torch.empty(len(order), dtype=widest_float(device), device=device)
            torch.cat(stacks, out=joined)
        for key, number in zip(order, joined.tolist(), strict=True):
            numbers[key] = number if tensors[key].is_floating_point() else int(number)
    return {
        key: numbers[key] if key in tensors else _read_number(key, value)
        for key, value in values.items()
    }


def _read_number(key: object, value: object) -> float | int:
    number = int(value) if isinstance(value, bool) else as_number(value)
    if number is None:
        raise TypeError(
            f"{key!r} is {value!r} ({type(value).__name__}): give a number or a tensor with one "
            "element"
        )
    return number


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python numbers, which every tracker accepts, with one read per device.

    None is dropped, and so is everything else that is not a number, with one WARNING per name.
    """
    values = metrics.values()
    if set(map(type, values)) <= {float, int} and all(
        is_one_number(value) for value in values if type(value) is int
    ):
        numbers: dict[str, float] = dict(metrics)
    else:
        numbers = read_scalars(only_numbers(metrics))
    if set(map(type, numbers)) <= {str} and "".join(numbers).isascii():
        return numbers
    return {as_name(name): value for name, value in numbers.items()}


@dataclass(frozen=True)
class Scalar:
    """A number or a tensor with one element, which TensorBoard may also show over samples."""

    value: Any
    versus_samples: bool = False


class Scalars:
    """Collects scalars by name. A repeated name starts another batch.

    It has the ``add_scalar`` of a ``SummaryWriter``, for code that expects one.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Scalar]] = []

    def add(self, name: str, value: Any, *, versus_samples: bool = False) -> None:
        """Collect one value. None and values that are not one number are dropped."""
        value = one_number(name, value)
        if value is None:
            return
        name = as_name(name)
        if not self.batches or name in self.batches[-1]:
            self.batches.append({})
        self.batches[-1][name] = Scalar(value, versus_samples)

    def add_all(
        self, values: Mapping[str, Any], prefix: str = "", *, versus_samples: bool = False
    ) -> None:
        """Collect values by name, with a prefix before each name."""
        for name, value in values.items():
            self.add(prefix + name, value, versus_samples=versus_samples)

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Collect one value of the step."""
        self.add(name, value)

    def read(self, others: Mapping[_Name, Any]) -> tuple[list[dict[str, Scalar]], dict[_Name, Any]]:
        """Copy all values and others to the host, with one transfer for each device.

        Returns the batches and the others with Python numbers. A None among the others stays.
        """
        wanted: dict[Any, Any] = {
            (_COLLECTED, index, name): scalar.value
            for index, batch in enumerate(self.batches)
            for name, scalar in batch.items()
        }
        wanted.update({name: value for name, value in others.items() if value is not None})
        numbers = read_scalars(wanted)
        batches = [
            {n: Scalar(numbers[_COLLECTED, index, n], s.versus_samples) for n, s in batch.items()}
            for index, batch in enumerate(self.batches)
        ]
        return batches, {name: numbers.get(name) for name in others}
