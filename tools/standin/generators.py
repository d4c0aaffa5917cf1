"""Generators of the stand-in: as on CUDA, several generators may share one state."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from standin import recording
from standin.guard import current_index
from standin.memory import NAME

_TorchGenerator: Any = torch.Generator


class _Kind(type(_TorchGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return type(value).__mro__.__contains__(_TorchGenerator)


class Generator(_TorchGenerator, metaclass=_Kind):  # type: ignore[misc]
    """A generator of any device. Numbers of the stand-in are those that the CPU would draw."""

    state: Any
    place: torch.device
    device = property(lambda self: self.place)

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return one of torch's if the device is another."""
        device = torch.device(device)
        if device.type != NAME:
            return _TorchGenerator(device)
        recording.refuse_in_capture("a new generator")
        index = current_index() if device.index is None else device.index
        return _make(torch.device(NAME, index), _TorchGenerator("cpu"))

    def manual_seed(self, seed: int) -> Generator:
        """Start from a seed."""
        recording.refuse_in_capture("manual_seed")
        self.state.manual_seed(seed)
        return self

    def get_state(self) -> torch.Tensor:
        """Return a copy of the state, on the CPU."""
        recording.refuse_in_capture("get_state")
        copied: torch.Tensor = self.state.get_state()
        return copied

    def set_state(self, state: torch.Tensor) -> Generator:
        """Continue from a copied state."""
        if state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        recording.refuse_in_capture("set_state")
        self.state.set_state(state)
        return self

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares the state."""
        return _make(self.device, self.state)

    def graphsafe_set_state(self, other: Generator) -> Generator:
        """Share the state of another generator."""
        self.state = other.state
        return self

    def clone_state(self) -> Generator:
        """Return a generator with an independent copy of the state."""
        return _make(self.device, self.state.clone_state())


def _make(device: torch.device, state: Any) -> Generator:
    # CUDA permits a handle of a state that exists in a capture too.
    made: Generator = _TorchGenerator.__new__(Generator, "cpu")
    made.place, made.state = device, state
    _made[made._cdata] = made
    return made


_made: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()
default_generators: list[Generator] = []


def find_state(generator: Any) -> Any:
    """Return the generator of the CPU that draws for one of the stand-in, None for others.

    Torch's dispatcher passes a generator on without its Python class.
    """
    return getattr(_made.get(generator._cdata), "state", None)
