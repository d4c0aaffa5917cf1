"""Named ranges for profilers: push and pop, a context manager and a decorator.

All ranges are off until :func:`configure_nvtx_profiling` switches them on. A backend shows them:
the nvtx package, torch's NVTX calls or the torch profiler.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from sys import _getframe
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import torch

from mcore.observe.async_tasks import kind_of, wrap_lifetime

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Pins(dict[_Key, _Value]):
    """Values by key, made at the first access and kept alive for the process, up to ``limit``.

    A CUDA graph that recorded a range keeps a pointer to its name, which must stay valid.
    """

    def __init__(self, make: Callable[[_Key], _Value], limit: int = 65536) -> None:
        super().__init__()
        self._make = make
        self._limit = limit
        self._warned = False

    def __missing__(self, key: _Key) -> _Value:
        value = self._make(key)
        if len(self) < self._limit:
            return self.setdefault(key, value)
        if not self._warned:
            self._warned = True
            logger.warning(
                "more than %d different range names. Further names are not kept alive: do not "
                "record them in CUDA graphs, and remove numbers that change from the names",
                self._limit,
            )
        return value


class RangeBackend:
    """Opens and closes ranges of one thread, and ranges that belong to no thread's stack.

    This one shows nothing.
    """

    name = "none"

    def push(self, message: str, color: str | None) -> Any:
        """Open a range of the current thread and return the handle for ``pop``."""

    def pop(self, handle: Any) -> None:
        """Close the innermost range of the current thread."""

    def start(self, message: str, color: str | None) -> Any:
        """Open a range that may overlap others and return the handle for ``end``."""
        return self.push(message, color)

    def end(self, handle: Any) -> None:
        """Close that range."""
        self.pop(handle)


class NvtxPackageBackend(RangeBackend):
    """The ``nvtx`` package: the domain ``mcore``, with colours."""

    name = "nvtx"

    def __init__(self) -> None:
        try:
            import nvtx

            self._domain = nvtx.get_domain("mcore")
        except Exception as error:
            raise RuntimeError(
                f'the range backend "nvtx" cannot work ({type(error).__name__}: {error}): '
                'pip install "mcore-observe[nvtx]", or choose another backend'
            ) from error
        self._looks: Pins[tuple[str, str | None], Any] = Pins(self._make_look)
        self._warned = False

    def push(self, message: str, color: str | None) -> None:
        """Open a range of the current thread."""
        self._domain.push_range(self._looks[message, color])

    def pop(self, handle: None) -> None:
        """Close the innermost range of the current thread."""
        self._domain.pop_range()

    def start(self, message: str, color: str | None) -> Any:
        """Open a range that may overlap others."""
        return self._domain.start_range(self._looks[message, color])

    def end(self, handle: Any) -> None:
        """Close that range."""
        self._domain.end_range(handle)

    def _make_look(self, key: tuple[str, str | None]) -> Any:
        message, color = key
        try:
            return self._domain.get_event_attributes(message=message, color=color)
        except Exception as error:  # the error's type depends on the kind of colour
            if color is None:
                raise
            if not self._warned:
                self._warned = True
                logger.warning("the colour %r is replaced by the default: %s", color, error)
            return self._domain.get_event_attributes(message=message, color=None)


class TorchNvtxBackend(RangeBackend):
    """The NVTX calls of torch's CUDA builds, without colours."""

    name = "torch.cuda.nvtx"

    def __init__(self) -> None:
        problem = _find_nvtx_problem()
        if problem is not None:
            raise RuntimeError(
                f'the range backend "torch.cuda.nvtx" cannot work with torch {torch.__version__} '
                f"({problem}): install a CUDA build of torch, or choose another backend"
            )
        self._nvtx: Any = torch.cuda.nvtx
        self._names: Pins[str, str] = Pins(str)

    def push(self, message: str, color: str | None) -> None:
        """Open a range of the current thread."""
        self._nvtx.range_push(self._names[message])

    def pop(self, handle: None) -> None:
        """Close the innermost range of the current thread."""
        self._nvtx.range_pop()

    def start(self, message: str, color: str | None) -> Any:
        """Open a range that may overlap others."""
        return self._nvtx.range_start(self._names[message])

    def end(self, handle: Any) -> None:
        """Close that range."""
        self._nvtx.range_end(handle)


class RecordBackend(RangeBackend):
    """``torch.profiler.record_function``: for the torch profiler, without a GPU too."""

    name = "record"

    def push(self, message: str, color: str | None) -> Any:
        """Open a range."""
        record: Any = torch.profiler.record_function(message)
        record.__enter__()
        return record

    def pop(self, handle: Any) -> None:
        """Close that range."""
        handle.__exit__(None, None, None)


BACKENDS: dict[str, Callable[[], RangeBackend]] = {
    backend.name: backend
    for backend in (NvtxPackageBackend, TorchNvtxBackend, RecordBackend, RangeBackend)
}


def check_backend_name(name: str) -> None:
    """Raise ValueError unless ``name`` is ``"auto"`` or a key of ``BACKENDS``."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown range backend {name!r}: choose from {['auto', *BACKENDS]}")


def select_backend(name: str) -> RangeBackend:
    """Make the backend of a name. ``"auto"`` is the first that works and has a viewer."""
    check_backend_name(name)
    if name != "auto":
        return BACKENDS[name]()
    try:
        return NvtxPackageBackend()
    except RuntimeError:
        pass
    # Without a device no CUDA trace can show the ranges, but a CPU trace can.
    if torch.cuda.is_available() and _find_nvtx_problem() is None:
        return TorchNvtxBackend()
    return RecordBackend()


@functools.cache
def _find_nvtx_problem() -> str | None:
    """Return the error of torch's NVTX calls, or None if they work. Tried once per process."""
    nvtx: Any = torch.cuda.nvtx
    try:
        nvtx.range_push("mcore.observe")
        nvtx.range_pop()
    except Exception as error:
        return str(error)
    return None


__all__ = [
    "configure_nvtx_profiling",
    "nvtx_decorator",
    "nvtx_range",
    "nvtx_range_pop",
    "nvtx_range_push",
]

_Func = TypeVar("_Func", bound=Callable[..., Any])
# The backend that opened a range and must close it, and the handle that its `push` returned.
_OpenRange: TypeAlias = "tuple[RangeBackend, Any]"

_nvtx_enabled: bool = False
# True while a thread may have an open range: after a switch-off its pops must still close it.
_may_be_open: bool = False
_backend = RangeBackend()
_NO_MODULE = "<unknown>"
_NO_RANGE: AbstractContextManager[None] = nullcontext()


class _RangeStack:
    """The open ranges of one thread, and their names in a list that is never replaced."""

    __slots__ = ("__weakref__", "messages", "opened")

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.opened: list[_OpenRange] = []

    def close(self, message: str) -> bool:
        """Close the innermost range by its backend. Return False if it has another name."""
        messages = self.messages
        if not messages or messages[-1] != message:
            return False
        messages.pop()
        backend, handle = self.opened.pop()
        backend.pop(handle)
        return True

    def close_down_to(self, depth: int, opened: _OpenRange) -> None:
        """Close an open range at ``depth`` after the ranges inside it, unless it is closed."""
        if depth < len(self.opened) and self.opened[depth] is opened:
            while len(self.messages) > depth:
                self.close(self.messages[-1])


_living: weakref.WeakSet[_RangeStack] = weakref.WeakSet()
_living_lock = threading.Lock()


class _Thread(threading.local):
    """The stack of the current thread, made at its first access in the thread."""

    def __init__(self) -> None:
        self.stack = _RangeStack()
        with _living_lock:
            _living.add(self.stack)


_thread = _Thread()


def __getattr__(name: str) -> list[str]:
    if name == "_nvtx_range_messages":
        return _thread.stack.messages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def configure_nvtx_profiling(enabled: bool, *, backend: str = "auto") -> None:
    """Switch ranges on or off for the whole process, from the next push on.

    Open ranges stay open until they are popped. The backend that opened a range closes it.

    Args:
        enabled: Whether ranges are recorded.
        backend: ``"auto"`` is the first of the following that works. ``"nvtx"``: the ``nvtx``
            package (extra ``nvtx``), domain ``mcore``, with colours. ``"torch.cuda.nvtx"``: the
            NVTX calls of torch, without colours. "auto" uses it only with a CUDA device.
            ``"record"``: :class:`torch.profiler.record_function`, visible in the torch profiler,
            on CPU too. ``"none"``: shows nothing, but names are still checked.

    Raises:
        ValueError: No such backend.
        RuntimeError: The named backend cannot work here. Nothing has changed.

    Example:
        >>> configure_nvtx_profiling(True, backend="record")
        >>> configure_nvtx_profiling(False)
    """
    global _nvtx_enabled, _may_be_open, _backend
    check_backend_name(backend)
    if enabled:
        _backend = select_backend(backend)
        _may_be_open = True
        _nvtx_enabled = True
    else:
        _nvtx_enabled = False
        _note_open_ranges()


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Open a range inside the innermost one of this thread. Does nothing while switched off.

    Args:
        msg: The name. None means ``"{module}.{function}"`` of the caller, without a class.
        suffix: Appended to the name after a dot.

    Example:
        >>> configure_nvtx_profiling(True, backend="none")
        >>> nvtx_range_push("forward", suffix="attention")
        >>> nvtx_range_pop("forward", suffix="attention")
        >>> configure_nvtx_profiling(False)
    """
    if _nvtx_enabled:
        if msg is None:  # written out: it saves a tenth of the time of a range
            frame = _getframe(1)
            try:
                msg = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
            except KeyError:
                msg = _nvtx_range_get_func_path()
        _open(msg if suffix is None else f"{msg}.{suffix}", None)


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Close the innermost range of this thread by the name it was opened with.

    While switched off it closes a range of this name that was opened before, and does nothing
    otherwise. The default name is that of the caller: push and pop in the same function, or name
    both.

    Args:
        msg: As for :func:`nvtx_range_push`.
        suffix: As for :func:`nvtx_range_push`.

    Raises:
        RuntimeError: This thread has no open range (while switched on).
        ValueError: The innermost range has another name (while switched on). It stays open.

    Example:
        >>> nvtx_range_pop("never opened")  # switched off: nothing happens
    """
    if _may_be_open:
        if msg is None:  # written out: it saves a tenth of the time of a range
            frame = _getframe(1)
            try:
                msg = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
            except KeyError:
                msg = _nvtx_range_get_func_path()
        # Do not add local variables: each makes a call slower, even while switched off.
        if suffix is not None:
            msg = f"{msg}.{suffix}"
        if not _thread.stack.close(msg) and _nvtx_enabled:
            _raise_wrong_pop(msg, _thread.stack.messages)
        if not _nvtx_enabled:
            _note_open_ranges()


def nvtx_range(
    msg: str | None = None, suffix: str | None = None, color: str | None = None
) -> AbstractContextManager[None]:
    """Make a context manager that opens a range for its block.

    It closes its range even if ranges are switched off inside the block, and with it all ranges
    that were pushed in the block and not popped. Around an ``await`` use :func:`nvtx_decorator` on
    the coroutine function instead, since the blocks of several tasks of a thread do not nest.

    Args:
        msg: As for :func:`nvtx_range_push`.
        suffix: As for :func:`nvtx_range_push`.
        color: A colour's name or ``"#rrggbb"``, for backends that have colours.

    Returns:
        A context manager for one ``with`` statement.

    Example:
        >>> with nvtx_range("optimizer step", color="green"):
        ...     pass
    """
    if not _nvtx_enabled:
        return _NO_RANGE
    if msg is None:
        msg = _nvtx_range_get_func_path()
    return _StackedRange(msg if suffix is None else f"{msg}.{suffix}", color)


def nvtx_decorator(
    message: str | None = None, color: str | None = None
) -> Callable[[_Func], _Func]:
    """Make a decorator that runs functions inside a range.

    The switch is read at each call. The range of a coroutine, generator or async generator lasts
    from its first step to its end, may overlap others, and is not in the stack of its thread.

    Args:
        message: The name. None means ``"{module}.{function}"`` of the decorated function.
        color: As for :func:`nvtx_range`.

    Returns:
        The decorator. It keeps name, documentation, signature and kind of the function.

    Example:
        >>> @nvtx_decorator(message="loss", color="blue")
        ... def loss(x):
        ...     return x * x
        >>> loss(3)
        9
    """

    def decorate(func: _Func) -> _Func:
        name = _nvtx_decorator_get_func_path(func) if message is None else message
        kind = kind_of(func)
        if kind == "function" and not hasattr(func, "__name__"):
            kind = kind_of(type(func).__call__)
        if kind != "function":
            return cast(
                "_Func",
                wrap_lifetime(
                    func, kind, lambda: _FreeRange(name, color) if _nvtx_enabled else _NO_RANGE
                ),
            )

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _nvtx_enabled:
                return func(*args, **kwargs)
            with _StackedRange(name, color):
                return func(*args, **kwargs)

        return cast("_Func", wrapper)

    return decorate


def _nvtx_range_get_func_path() -> str:
    """Return ``"{module}.{function}"`` of the caller of the function that calls this one."""
    frame = _getframe(2)
    return f"{frame.f_globals.get('__name__', _NO_MODULE)}.{frame.f_code.co_name}"


def _nvtx_decorator_get_func_path(func: Callable[..., Any]) -> str:
    """Return ``"{module}.{function}"`` of a function, or ``"{module}.{type}"`` of a callable."""
    owner = func if hasattr(func, "__name__") else type(func)
    return f"{getattr(owner, '__module__', None) or _NO_MODULE}.{owner.__name__}"


def _open(message: str, color: str | None) -> _OpenRange:
    global _may_be_open
    backend = _backend
    opened = backend, backend.push(message, color)
    stack = _thread.stack
    stack.messages.append(message)
    stack.opened.append(opened)
    if not _may_be_open:  # another thread has switched ranges off since the caller's check
        _may_be_open = True
    return opened


def _raise_wrong_pop(message: str, messages: list[str]) -> NoReturn:
    if not messages:
        raise RuntimeError(
            f"popped the range {message!r}, but this thread has no open range: push it first"
        )
    raise ValueError(
        f"popped the range {message!r}, but the innermost open one is {messages[-1]!r}: pop in "
        "the function that pushed, or give both the same name"
    )


def _note_open_ranges() -> None:
    """Make pops return at once when no thread has an open range."""
    global _may_be_open
    _may_be_open = False  # before the check: a concurrent push sets it back to True
    with _living_lock:
        if any(stack.messages for stack in _living):
            _may_be_open = True


class _StackedRange:
    """A range in the stack of its thread."""

    def __init__(self, message: str, color: str | None) -> None:
        self._message = message
        self._color = color

    def __enter__(self) -> None:
        self._depth = len(_thread.stack.messages)
        self._opened = _open(self._message, self._color)

    def __exit__(self, *raised: object) -> None:
        _thread.stack.close_down_to(self._depth, self._opened)
        if not _nvtx_enabled:
            _note_open_ranges()


class _FreeRange:
    """A range that may overlap others and end in another thread."""

    def __init__(self, message: str, color: str | None) -> None:
        self._message = message
        self._color = color

    def __enter__(self) -> None:
        self._backend = _backend
        self._handle = self._backend.start(self._message, self._color)

    def __exit__(self, *raised: object) -> None:
        self._backend.end(self._handle)
