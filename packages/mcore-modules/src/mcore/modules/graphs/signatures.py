"""What the inputs of a graph look like, and how other inputs differ from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from mcore.modules.errors import GraphInputMismatch

__all__ = ["InputSignature", "TensorSignature", "signature_of"]


class TensorSignature(NamedTuple):
    """What must be the same in every call of a graph.

    Example:
        >>> import torch
        >>> signature_of(torch.ones(2, 3)).shape
        (2, 3)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def signature_of(tensor: torch.Tensor) -> TensorSignature:
    """Return the signature of a tensor.

    Example:
        >>> import torch
        >>> signature_of(torch.ones(2)).requires_grad
        False
    """
    return TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)


class InputSignature:
    """The signatures of a graph's positional and keyword inputs.

    Args:
        args: Sample positional inputs.
        kwargs: Sample keyword inputs, none of them None.

    Example:
        >>> import torch
        >>> try:
        ...     InputSignature((torch.ones(2),), {}).check((torch.ones(3),), {})
        ... except GraphInputMismatch as error:
        ...     print(str(error).split("; ")[-1])
        give inputs alike or capture anew: input 0: shape is (3,), captured with (2,)
    """

    def __init__(self, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        self._expected = _signatures(args, kwargs)

    def check(
        self,
        args: tuple[torch.Tensor, ...],
        kwargs: Mapping[str, torch.Tensor],
        *,
        with_requires_grad: bool = True,
    ) -> None:
        """Raise GraphInputMismatch with every difference of these inputs from the sample.

        Args:
            args: Positional inputs.
            kwargs: Keyword inputs, none of them None.
            with_requires_grad: Compare ``requires_grad`` too.

        Raises:
            GraphInputMismatch: The inputs differ.
        """
        given = _signatures(args, kwargs)
        # The usual case, decided without building messages.
        if given == self._expected:
            return
        differences = list(_differences(self._expected, given, with_requires_grad))
        if differences:
            raise GraphInputMismatch(
                "the inputs differ from those of the capture; give inputs alike or capture anew: "
                + "; ".join(differences)
            )


_Signatures = dict["int | str", TensorSignature]


def _signatures(args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]) -> _Signatures:
    signatures: _Signatures = {index: signature_of(tensor) for index, tensor in enumerate(args)}
    for name, tensor in kwargs.items():
        signatures[name] = signature_of(tensor)
    return signatures


def _differences(expected: _Signatures, given: _Signatures, with_requires_grad: bool) -> list[str]:
    differences = [f"input {name!r} is missing" for name in expected if name not in given]
    differences += [f"input {name!r} is unexpected" for name in given if name not in expected]
    for name in expected.keys() & given.keys():
        for field in TensorSignature._fields:
            is_compared = with_requires_grad or field != "requires_grad"
            wanted, got = getattr(expected[name], field), getattr(given[name], field)
            if is_compared and wanted != got:
                differences.append(f"input {name!r}: {field} is {got}, captured with {wanted}")
    return differences
