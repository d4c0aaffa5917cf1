"""Outputs of a layer as a flat tuple of tensors, and back."""

from __future__ import annotations

from typing import Any

import torch

from mcore.modules.precision import conversion_helper

__all__ = ["OutputTemplate"]


class _Place:
    """Stands for a tensor in a template."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class OutputTemplate:
    """The structure of a layer's outputs, with what is no tensor in it, such as None.

    Graphs give tensors only, while layers also return, say, ``(hidden_states, None)``.

    Example:
        >>> import torch
        >>> template = OutputTemplate()
        >>> tensors = template.flatten((torch.ones(1), {"context": None}))
        >>> template.unflatten(tensors)
        (tensor([1.]), {'context': None})
    """

    def __init__(self) -> None:
        self._template: Any = None

    def flatten(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        """Return the distinct tensors of the outputs and remember the rest.

        Args:
            outputs: A tensor or nested containers, see ``conversion_helper``.

        Returns:
            The tensors, in order of appearance.
        """
        tensors: list[torch.Tensor] = []

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        self._template = conversion_helper(outputs, replace)
        return tuple(tensors)

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return outputs like the last that were flattened, with other tensors.

        Args:
            tensors: As many as :meth:`flatten` returned.

        Returns:
            The nested outputs.
        """
        return conversion_helper(
            self._template, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf
        )
