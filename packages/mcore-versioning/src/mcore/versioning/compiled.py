"""Marks for ``torch.compile``, set as attributes, which need no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound="Callable[..., Any]")


def constant_when_compiled(func: F) -> F:
    """Let torch call a function while it compiles, and treat the result as a constant.

    The same as ``torch.compiler.assume_constant_result``.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


def compiled_as(substitute: F) -> Callable[[F], F]:
    """Let torch compile another function in place of the decorated function.

    Only for private functions: ``functools.wraps`` copies the attribute to wrappers, which
    ``torch.compile`` would then skip.
    """

    def mark(func: F) -> F:
        func._torchdynamo_inline = substitute  # type: ignore[attr-defined]
        return func

    return mark
