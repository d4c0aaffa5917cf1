"""The scalars of one step, collected before any of them is read or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mcore.observe.host_reads import read_scalars

__all__ = ["Scalar", "Scalars"]

_Name = TypeVar("_Name")
_OWN = object()


@dataclass(frozen=True)
class Scalar:
    """One value of a step.

    Attributes:
        value: A number, or a tensor with one element on any device.
        versus_samples: TensorBoard also shows it over the samples consumed.
    """

    value: Any
    versus_samples: bool = False


class Scalars:
    """Collects scalars by name; a name that comes twice opens a further batch.

    It has the ``add_scalar`` of a ``SummaryWriter``, so that code made for one can add to it.

    Example:
        >>> scalars = Scalars()
        >>> scalars.add("batch-size", 64, versus_samples=True)
        >>> scalars.add_scalar("z_loss", 0.5, 1)
        >>> [list(batch) for batch in scalars.batches]
        [['batch-size', 'z_loss']]
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
        """Copy all values to the host together with others, one transfer for each device.

        Args:
            others: Further numbers and tensors by any key; None stays None.

        Returns:
            The batches with Python numbers, and the others as Python numbers.

        Example:
            >>> import torch
            >>> scalars = Scalars()
            >>> scalars.add("lm loss", torch.tensor(2.5))
            >>> batches, others = scalars.read({"grad_norm": torch.tensor(0.5), "zeros": None})
            >>> batches
            [{'lm loss': Scalar(value=2.5, versus_samples=False)}]
            >>> others
            {'grad_norm': 0.5, 'zeros': None}
        """
        keyed = dict(self._keyed())
        wanted: dict[Any, Any] = {(_OWN, *key): scalar.value for key, scalar in keyed.items()}
        wanted.update({name: value for name, value in others.items() if value is not None})
        numbers = read_scalars(wanted)
        batches: list[dict[str, Scalar]] = [{} for _ in self.batches]
        for (index, name), scalar in keyed.items():
            batches[index][name] = Scalar(numbers[_OWN, index, name], scalar.versus_samples)
        return batches, {name: numbers.get(name) for name in others}

    def _keyed(self) -> Iterator[tuple[tuple[int, str], Scalar]]:
        for index, batch in enumerate(self.batches):
            for name, scalar in batch.items():
                yield (index, name), scalar
