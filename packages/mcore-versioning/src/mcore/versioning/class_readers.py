"""Callers that may read or call a gated class while its gate is closed.

Objects made while the gate was open keep working: their methods can use the class, and a backward
pass can use its function. Tools that describe a class see its members at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

# Prefixes of module names, with a dot added to each. The modules of torch compile live modules and
# evaluate the guards of compiled code.
_TOOLS = (
    "IPython.",
    "_pytest.",
    "doctest.",
    "griffe.",
    "inspect.",
    "jedi.",
    "pdoc.",
    "pydantic.",
    "pydoc.",
    "rlcompleter.",
    "sphinx.",
    "torch._dynamo.",
    "torch._guards.",
    "torch.fx.",
    "torch.jit.",
    "unittest.mock.",
)
# These modules make an instance only from another instance.
_COPIERS = ("attr.", "copy.", "dataclasses.", "torch.utils._pytree.")
_READ_AFTER_FORWARD = ("backward", "vjp")
_AUTOGRAD = "torch.autograd.function"


def may_read(frame: FrameType, gated: type[Any], name: str, is_in_use: bool) -> bool:
    """Return whether the code in a frame may read an attribute of a gated class."""
    if _is_run_by(frame, _TOOLS) or _is_for_live_object(frame, gated, is_construction=False):
        return True
    return is_in_use and name in _READ_AFTER_FORWARD and _is_autograd_function(gated)


def may_construct(frame: FrameType, gated: type[Any]) -> bool:
    """Return whether the code in a frame may make another instance of a gated class."""
    return _is_run_by(frame, _COPIERS) or _is_for_live_object(frame, gated, is_construction=True)


def _is_run_by(frame: FrameType, modules: tuple[str, ...]) -> bool:
    named = (caller.f_globals.get("__name__") for caller in _iterate_callers(frame))
    # Code of exec() may have no module name: its caller's name counts.
    module = next((name for name in named if name is not None), "")
    return f"{module}.".startswith(modules)


def _is_for_live_object(frame: FrameType, gated: type[Any], *, is_construction: bool) -> bool:
    """Return whether a method of a live object, or a method that only such objects call, runs."""
    return any(
        _has_live_self(caller, gated) or _is_own_code(caller.f_code, gated, is_construction)
        for caller in _iterate_callers(frame)
    )


def _iterate_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _has_live_self(frame: FrameType, gated: type[Any]) -> bool:
    code = frame.f_code
    if "self" not in code.co_varnames[:1] and "self" not in code.co_freevars:
        return False
    return gated in type(frame.f_locals.get("self")).__mro__


def _is_own_code(code: CodeType, gated: type[Any], is_construction: bool) -> bool:
    """Return whether code is a method of the class, which the closed gate keeps from other callers.

    Private methods can be called through the gate, so they may not construct instances.
    """
    name = code.co_name
    method = vars(gated).get(name)
    if method is None or (is_construction and name.startswith("_")):
        return False
    while method is not None:
        if getattr(method, "__code__", None) is code:
            return True
        method = getattr(method, "__func__", None) or getattr(method, "__wrapped__", None)
    return False


def _is_autograd_function(cls: type[Any]) -> bool:
    return any(base.__module__ == _AUTOGRAD for base in cls.__mro__)
