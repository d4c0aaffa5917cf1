"""The flag that enables experimental code, for the whole process or for one block."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

__all__ = [
    "ENABLE_EXPERIMENTAL",
    "experimental_enabled",
    "is_experimental_enabled",
    "set_experimental_flag",
]

_VARIABLE = "MCORE_EXPERIMENTAL"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def _read_environment() -> bool:
    text = os.environ.get(_VARIABLE, "").strip().lower()
    if text not in (*_ON, *_OFF):
        import warnings

        warnings.warn(
            f"the environment variable {_VARIABLE} is {text!r}, which leaves experimental code "
            "off. Set it to 1 or 0",
            RuntimeWarning,
            stacklevel=2,
        )
    return text in _ON


ENABLE_EXPERIMENTAL: bool = _read_environment()
"""Whether experimental code may run. Read at every call. Any value other than ``True`` means no.

It is initially True if the environment has ``MCORE_EXPERIMENTAL=1``, which child processes inherit.
Code may replace it, and :func:`experimental_enabled` overrides both within a block.
"""

_override: ContextVar[bool | None] = ContextVar("mcore_experimental_override", default=None)

# Becomes True with the first `experimental_enabled` block of the process and stays so. Until then
# no context can hold an override, and gated calls need not look for one.
_may_be_overridden = False

_this_module: Any = sys.modules[__name__]


def set_experimental_flag(flag: bool) -> None:
    """Switch experimental code on or off for the whole process.

    This overrides the environment variable ``MCORE_EXPERIMENTAL``, which is read at import.
    Processes that are started later do not inherit the flag. They read the variable.

    Args:
        flag: The new value of ``ENABLE_EXPERIMENTAL``.

    Raises:
        TypeError: ``flag`` is not a bool. ``"false"`` or ``1`` would be a silent "off".

    Example:
        >>> set_experimental_flag(True)
        >>> is_experimental_enabled()
        True
        >>> set_experimental_flag(False)
    """
    global ENABLE_EXPERIMENTAL
    ENABLE_EXPERIMENTAL = _check_flag(flag)


def is_experimental_enabled() -> bool:
    """Return whether experimental code may run now, in this thread or task.

    Returns:
        The value of the innermost ``experimental_enabled`` block of this thread or task. Outside
        any block, whether ``ENABLE_EXPERIMENTAL`` is True.

    Example:
        >>> is_experimental_enabled()
        False
    """
    return _is_enabled()


def experimental_enabled(flag: bool = True) -> AbstractContextManager[None]:
    """Switch experimental code on or off for one block.

    The block applies to the current thread or asyncio task and to the tasks that it starts.
    Threads that it starts see ``ENABLE_EXPERIMENTAL``. Blocks nest, and the earlier state is
    restored after an exception too. A generator that yields inside a block leaves it in force in
    its caller until it continues, as functions of ``contextlib.contextmanager`` need.

    Args:
        flag: The result of ``is_experimental_enabled`` inside the block.

    Returns:
        A context manager for a single use.

    Raises:
        TypeError: ``flag`` is not a bool.

    Example:
        >>> with experimental_enabled():
        ...     with experimental_enabled(False):
        ...         is_experimental_enabled()
        False
    """
    return _override_in_block(_check_flag(flag))


def checking_before_calls(
    func: Callable[..., Any], check: Callable[[], None], pending: list[bool]
) -> Callable[..., Any]:
    """Wrap a function to call ``check``, which may raise, before each call.

    As soon as ``pending`` is empty, a call only reads the flag and, after the first block of the
    process, the override. That is faster in this module than from another one.
    """

    @wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if pending or (
            not _is_enabled() if _may_be_overridden else ENABLE_EXPERIMENTAL is not True
        ):
            check()
        return func(*args, **kwargs)

    return checked


def __getattr__(name: str) -> object:
    # torch.compile cannot read a ContextVar. It can guard on an attribute of a module, and reads
    # this attribute anew, in the context of the caller, before each use of compiled code.
    if name == "_guarded_override":
        return _override.get()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_enabled_when_traced() -> bool:
    override: bool | None = _this_module._guarded_override
    return ENABLE_EXPERIMENTAL is True if override is None else override


def _is_enabled() -> bool:
    override = _override.get()
    return ENABLE_EXPERIMENTAL is True if override is None else override


# torch compiles that function in place of this one.
_is_enabled._torchdynamo_inline = _is_enabled_when_traced  # type: ignore[attr-defined]


@contextmanager
def _override_in_block(flag: bool) -> Iterator[None]:
    global _may_be_overridden
    _may_be_overridden = True
    # Not ContextVar.reset: its token is refused if a block is left in a different context than it
    # was entered in, as in generator fixtures of test frameworks.
    earlier = _override.get()
    _override.set(flag)
    try:
        yield
    finally:
        _override.set(earlier)


def _check_flag(flag: bool) -> bool:
    if not isinstance(flag, bool):
        raise TypeError(f"the experimental flag must be True or False, not {flag!r}")
    return flag
