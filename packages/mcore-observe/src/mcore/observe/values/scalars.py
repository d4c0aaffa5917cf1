"""The scalars of a step: collected, then copied from devices to the host in one transfer."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_LARGEST = int(sys.float_info.max)


def as_number(value: object) -> float | int | None:
    """Return a Python or NumPy number as a Python number; None for booleans and anything else."""
    if type(value) in (int, float):  # nearly all values; the others take ten times as long
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if hasattr(value, "__index__") else float(value)


def is_one_number(value: object) -> bool:
    """Return whether a value is a number, or a real tensor of one element that can be read."""
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        return value.numel() == 1 and is_plain and not value.is_complex()
    if type(value) is int:
        return abs(value) <= _LARGEST
    return isinstance(value, bool) or as_number(value) is not None


def one_number(name: Any, value: Any, *, warns: bool = True) -> Any:
    """Return a number, and None, with one WARNING for each name, for anything else.

    A tensor stays one; an array of one element, such as NumPy's, becomes its number.
    """
    if value is None or is_one_number(value):
        return value
    if not isinstance(value, torch.Tensor) and getattr(value, "size", None) == 1:
        found = value.item() if callable(getattr(value, "item", None)) else None
        if found is not None and is_one_number(found):
            return found
    if warns:
        kind = type(value).__name__
        text = "an int too large for a float" if kind == "int" else f"not a number but a {kind}"
        _warn_left_out(as_name(name), text)
    return None


def as_name(name: object) -> str:
    """Return the name of a value as a text that every file takes."""
    text = name if isinstance(name, str) else str(name)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def only_numbers(values: Mapping[str, Any], *, warns: bool = True) -> dict[str, Any]:
    """Return the values that are one number each; others are left out as by :func:`one_number`."""
    checked = {name: one_number(name, value, warns=warns) for name, value in values.items()}
    return {name: value for name, value in checked.items() if value is not None}


@functools.lru_cache(maxsize=1024)
def _warn_left_out(name: str, text: str) -> None:
    logger.warning("%r is %s and is not logged; give one number", name, text)


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_scalars(values: Mapping[_Key, object]) -> dict[_Key, float | int]:
    """Read numbers and one-element tensors, with one transfer for each device.

    Integers and integer tensors become ints, all else floats, under the same keys and in order.
    """
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    numbers: dict[Any, float | int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        there = {key: tensor for key, tensor in tensors.items() if tensor.device == device}
        numbers.update(zip(there, _read_device(there.values(), device), strict=True))
    return {
        key: _restored(tensors[key], numbers[key]) if key in tensors else _number(key, value)
        for key, value in values.items()
    }


def _read_device(tensors: Iterable[torch.Tensor], device: torch.device) -> list[float]:
    dtype = widest_float(device)
    scalars = [tensor.detach().reshape(()) for tensor in tensors]
    if len({scalar.dtype for scalar in scalars}) > 1:
        scalars = [scalar.to(dtype) for scalar in scalars]
    numbers: list[float] = torch.stack(scalars).to(dtype).tolist()
    return numbers


def _restored(tensor: torch.Tensor, number: float) -> float | int:
    return number if tensor.is_floating_point() else int(number)


def _number(key: object, value: object) -> float | int:
    number = as_number(value)
    if number is None:
        if isinstance(value, bool):
            return int(value)
        raise TypeError(
            f"{key!r} is {value!r} ({type(value).__name__}); give a number or a tensor with one "
            "element"
        )
    return number


_Name = TypeVar("_Name")
_OWN = object()


@dataclass(frozen=True)
class Scalar:
    """A number, or a tensor with one element; TensorBoard may show it over samples too."""

    value: Any
    versus_samples: bool = False


class Scalars:
    """Collects scalars by name; a repeated name opens another batch.

    It has the ``add_scalar`` of a ``SummaryWriter``, so that code written for one can add to it.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Scalar]] = []

    def add(self, name: str, value: Any, *, versus_samples: bool = False) -> None:
        """Collect one value; None and what is not one number are left out."""
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

        Returns the batches and the others with Python numbers; a None among the others stays.
        """
        wanted: dict[Any, Any] = {
            (_OWN, index, name): scalar.value
            for index, batch in enumerate(self.batches)
            for name, scalar in batch.items()
        }
        wanted.update({name: value for name, value in others.items() if value is not None})
        numbers = read_scalars(wanted)
        batches = [
            {n: Scalar(numbers[_OWN, index, n], s.versus_samples) for n, s in batch.items()}
            for index, batch in enumerate(self.batches)
        ]
        return batches, {name: numbers.get(name) for name in others}
