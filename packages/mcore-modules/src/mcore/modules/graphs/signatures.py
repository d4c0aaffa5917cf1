"""What the inputs and tensors of a layer must be in every call of a graph of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from mcore.modules.errors import GraphInputMismatch
from mcore.modules.traversal import iter_modules


class TensorSignature(NamedTuple):
    """What must be the same in every call of a graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def signature_of(tensor: torch.Tensor) -> TensorSignature:
    """Return the signature of a tensor."""
    return TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return what autocast casts to on a kind of device, None while it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class InputSignature:
    """The signatures of a graph's positional and keyword inputs, none of which is None."""

    def __init__(self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        first = next(chain(args, kwargs.values()), None)
        self._device_type = "cpu" if first is None else first.device.type
        self._autocast = autocast_dtype(self._device_type)
        self._args = [signature_of(tensor) for tensor in args]
        self._kwargs = {name: signature_of(tensor) for name, tensor in kwargs.items()}

    def check(
        self,
        args: tuple[torch.Tensor, ...],
        kwargs: Mapping[str, torch.Tensor],
        *,
        with_gradients: bool,
    ) -> None:
        """Raise GraphInputMismatch with every difference of these inputs from the sample."""
        # The usual case, decided without building messages.
        autocast = autocast_dtype(self._device_type)
        if (
            autocast is self._autocast
            and len(args) == len(self._args)
            and kwargs.keys() == self._kwargs.keys()
            and all(_fits(a, b, with_gradients) for a, b in zip(args, self._args, strict=True))
            and all(_fits(kwargs[name], self._kwargs[name], with_gradients) for name in kwargs)
        ):
            return
        expected: dict[int | str, TensorSignature] = dict(enumerate(self._args))
        given: dict[int | str, torch.Tensor] = dict(enumerate(args))
        expected.update(self._kwargs)
        given.update(kwargs)
        differences = [*_input_differences(expected, given, with_gradients)]
        if autocast is not self._autocast:
            differences.append(f"autocast is {autocast}, captured with {self._autocast}")
        raise GraphInputMismatch(
            "the inputs differ from those of the capture; pass the same kind or capture again: "
            + "; ".join(differences)
        )


def _fits(tensor: torch.Tensor, expected: TensorSignature, with_gradients: bool) -> bool:
    return (
        tensor.shape == expected.shape
        and tensor.dtype is expected.dtype
        and tensor.device == expected.device
        # A gradient that the graph has and nobody needs is dropped.
        and (expected.requires_grad or not with_gradients or not tensor.requires_grad)
    )


def _input_differences(
    expected: Mapping[int | str, TensorSignature],
    given: Mapping[int | str, torch.Tensor],
    with_gradients: bool,
) -> Iterator[str]:
    yield from (f"input {name!r} is missing" for name in expected if name not in given)
    yield from (f"input {name!r} is unexpected" for name in given if name not in expected)
    for name in [name for name in expected if name in given]:
        for text in _differences(expected[name], given[name], with_gradients):
            yield f"input {name!r}: {text}"


def _differences(
    expected: TensorSignature, tensor: torch.Tensor, with_gradients: bool
) -> Iterator[str]:
    given = signature_of(tensor)
    for name in ("shape", "dtype", "device"):
        wanted, got = getattr(expected, name), getattr(given, name)
        if wanted != got:
            yield f"{name} is {got}, captured with {wanted}"
    if with_gradients and given.requires_grad and not expected.requires_grad:
        yield "requires_grad is True, captured with False"


class ReplacedTensorError(GraphInputMismatch):
    """A parameter or buffer is not the tensor that was captured."""


class LayerTensors:
    """The parameters and buffers of a layer as they were at the capture.

    Holds the modules' dicts, not the modules, so that graphs keep no deleted layer alive.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        named = {id(tensor): name for name, tensor in module.named_parameters()}
        named.update({id(tensor): name for name, tensor in module.named_buffers()})
        owners = list(iter_modules(module))
        parameters = _captured([owner._parameters for owner in owners], named)
        buffers = _captured([owner._buffers for owner in owners], named)
        # What each call needs, and no more: calls are many.
        self._held = [(entry.held, entry.key, entry.tensor, entry.pointer) for entry in parameters]
        self._frozen = [entry for entry in parameters if not entry.required_grad]
        self._buffers = buffers
        self._entries = parameters
        self._parameters = [entry.tensor for entry in parameters]

    def check(self, *, with_gradients: bool) -> list[torch.Tensor]:
        """Return the parameters; ReplacedTensorError where a tensor's memory is another now."""
        for held, key, captured, pointer in self._held:
            tensor = held.get(key)
            if tensor is not captured or (pointer and tensor.data_ptr() != pointer):
                raise _replaced(self._entries, with_gradients)
        if with_gradients and any(entry.tensor.requires_grad for entry in self._frozen):
            raise _replaced(self._entries, with_gradients)
        for entry in self._buffers:
            tensor = entry.held.get(entry.key)
            if tensor is None or (entry.pointer and tensor.data_ptr() != entry.pointer):
                raise _replaced([entry], with_gradients)
        return self._parameters


class _CapturedTensor(NamedTuple):
    held: dict[str, Any]
    key: str
    tensor: torch.Tensor
    pointer: int
    required_grad: bool
    name: str


def _captured(dicts: Sequence[dict[str, Any]], named: dict[int, str]) -> list[_CapturedTensor]:
    """Return an entry for each distinct tensor, and remove its name."""
    return [
        _CapturedTensor(
            held, key, tensor, _pointer_of(tensor), tensor.requires_grad, named.pop(id(tensor))
        )
        for held in dicts
        for key, tensor in held.items()
        if tensor is not None and id(tensor) in named
    ]


def _pointer_of(tensor: torch.Tensor) -> int:
    """Return where a tensor lies, 0 for one without memory of its own, such as a quantised one."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _replaced(entries: list[_CapturedTensor], with_gradients: bool) -> ReplacedTensorError:
    changes = [text for entry in entries for text in _changes_of(entry, with_gradients)]
    return ReplacedTensorError(f"{'; '.join(changes)}; capture the layer again")


def _changes_of(entry: _CapturedTensor, with_gradients: bool) -> Iterator[str]:
    tensor = entry.held.get(entry.key)
    what = f"{entry.name!r} of the layer"
    if tensor is None:
        yield f"{what} was removed after the capture"
    elif tensor is not entry.tensor or (entry.pointer and tensor.data_ptr() != entry.pointer):
        yield f"{what} was replaced or moved after the capture"
    elif with_gradients and tensor.requires_grad and not entry.required_grad:
        yield f"{what} requires grad now, captured without"
