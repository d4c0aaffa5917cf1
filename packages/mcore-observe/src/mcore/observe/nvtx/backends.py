"""Backends for named ranges: the nvtx package, torch's NVTX calls, the torch profiler."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

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


class RangeBackend(Protocol):
    """Opens and closes ranges of one thread, and ranges that belong to no thread's stack."""

    name: str

    def push(self, message: str, color: str | None) -> Any:
        """Open a range of the current thread and return the handle for ``pop``."""

    def pop(self, handle: Any) -> None:
        """Close the innermost range of the current thread."""

    def start(self, message: str, color: str | None) -> Any:
        """Open a range that may overlap others and return the handle for ``end``."""

    def end(self, handle: Any) -> None:
        """Close that range."""


class NoBackend:
    """Shows nothing."""

    name = "none"

    def push(self, message: str, color: str | None) -> None:
        """Do nothing."""

    def pop(self, handle: None) -> None:
        """Do nothing."""

    start = push
    end = pop


class NvtxPackageBackend:
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


class TorchNvtxBackend:
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


class RecordBackend:
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

    start = push
    end = pop


BACKENDS: dict[str, Callable[[], RangeBackend]] = {
    backend.name: backend
    for backend in (NvtxPackageBackend, TorchNvtxBackend, RecordBackend, NoBackend)
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
