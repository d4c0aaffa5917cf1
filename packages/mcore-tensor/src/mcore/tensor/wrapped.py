"""A one-time hand-over of a tensor from a caller to a callee."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

from torch import Tensor

T = TypeVar("T", bound="Tensor | None")


class WrappedTensor(Generic[T]):
    """A holder that lets a callee free a tensor that its caller passed in.

    A caller that passes a tensor keeps a reference to it until the call returns. If it passes
    ``WrappedTensor(tensor)`` instead and keeps no reference, the callee can take the tensor out and
    free it before it returns. If several threads call ``unwrap()``, exactly one gets the tensor. It
    cannot be copied or pickled, since a second reference would keep the tensor alive.

    Args:
        tensor: The tensor to hand over, or None (on a middle pipeline stage, for example).

    Example:
        >>> import torch
        >>> wrapped = WrappedTensor(torch.ones(2))
        >>> wrapped.unwrap()
        tensor([1., 1.])
        >>> wrapped
        WrappedTensor(unwrapped)
    """

    __slots__ = ("__weakref__", "_held")

    def __init__(self, tensor: T) -> None:
        self._held = [tensor]

    def unwrap(self) -> T:
        """Return the tensor and drop the reference to it.

        Returns:
            The wrapped tensor, or the wrapped None.

        Raises:
            RuntimeError: The tensor was taken out before.

        Example:
            >>> import torch
            >>> WrappedTensor(torch.zeros(1)).unwrap()
            tensor([0.])
        """
        try:
            return self._held.pop()  # list.pop is atomic: one thread gets it
        except IndexError:
            pass
        raise RuntimeError(
            "the WrappedTensor has already been unwrapped: unwrap() returns the tensor once, "
            "keep the result"
        )

    def __repr__(self) -> str:
        return f"WrappedTensor({'wrapped' if self._held else 'unwrapped'})"

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a WrappedTensor cannot be copied or pickled, since it holds the only reference to its "
            "tensor: pass the object itself, or unwrap() it"
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = __getstate__ = _refuse_copy
