"""Knowing whether the backward of a graph's last forward is still to come."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mcore.modules.precision import conversion_helper

__all__ = ["InFlight"]


class _Token:
    """Lives as long as the autograd graph of one forward."""

    __slots__ = ("__weakref__", "backward_ran")

    def __init__(self) -> None:
        self.backward_ran = False


class _Watch(torch.autograd.Function):
    """Identity that holds a token and notes that backward passed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, token: _Token) -> torch.Tensor:
        ctx.token = token
        ctx.set_materialize_grads(False)
        # A view would have a _base, which pipeline schedules refuse to send.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        ctx.token.backward_ran = True
        return grad, None


class InFlight:
    """Whether outputs of a graph wait for their backward.

    Outputs that are dropped, in an evaluation or after an exception, no longer wait: their autograd
    graph held the only reference to the token.

    Example:
        >>> import torch
        >>> flight = InFlight()
        >>> out = flight.watch(torch.ones(1, requires_grad=True) * 2)
        >>> flight.is_busy
        True
        >>> out.backward()
        >>> flight.is_busy
        False
    """

    def __init__(self) -> None:
        self._token: weakref.ref[_Token] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a backward is still to come."""
        token = None if self._token is None else self._token()
        return token is not None and not token.backward_ran

    def watch(self, outputs: Any) -> Any:
        """Return the outputs, the first that requires grad replaced by a watched identity of it.

        Args:
            outputs: A tensor or nested containers of tensors.

        Returns:
            The same structure; the same object if no output requires grad.
        """
        token = _Token()
        watched = False

        def watch_first(leaf: Any) -> Any:
            nonlocal watched
            if watched or not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            watched = True
            return _Watch.apply(leaf, token)  # type: ignore[no-untyped-call]

        replaced = conversion_helper(outputs, watch_first)
        if not watched:
            return outputs
        self._token = weakref.ref(token)
        return replaced
