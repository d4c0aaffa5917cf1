"""The scalars of one step, collected before any of them is read or sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore.observe.host_reads import read_scalars

_Name = TypeVar("_Name")
_OWN = object()


@dataclass(frozen=True)
class Scalar:
    """A number, or a tensor with one element; TensorBoard may show it over samples too."""

    value: Any
    versus_samples: bool = False


class Scalars:
    """Collects scalars by name; a name that comes twice opens a further batch.

    It has the ``add_scalar`` of a ``SummaryWriter``, so that code made for one can add to it.
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Scalar]] = []

    def add(self, name: str, value: Any, *, versus_samples: bool = False) -> None:
        """Collect one value; None is left out."""
        if value is None:
            return
        if not self.batches or name in self.batches[-1]:
            self.batches.append({})
        self.batches[-1][name] = Scalar(value, versus_samples)

    def add_all(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """Collect values by name, with a prefix before each name."""
        for name, value in values.items():
            self.add(prefix + name, value)

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
