"""Named buffers that are allocated once and reused."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore.tensor.device import is_transform_wrapper, resolve_device, traced_device

_Key = tuple[Hashable, torch.dtype, torch.device]
_AllocationContext = Callable[[], AbstractContextManager[Any]]
_MAX_SHAPES = 16  # per buffer: limits the kept views if every request has a new shape
_INT = frozenset({int})
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # saves a look-up on the hot path
_ANY: Hashable = object()  # means every name. Not None, since None is a valid name


class _Views(NamedTuple):
    """Tensors without a base on a backing tensor, by shape: a reuse only costs a ``detach()``."""

    backing: Tensor
    by_shape: dict[tuple[int, ...], Tensor]


class GlobalMemoryBuffer:
    """Memory that is allocated once per name, dtype and device, and reused by later requests.

    A buffer only grows. Requests of the same name, dtype and device share its start and overwrite
    each other, so the caller must not use a name for two purposes at the same time. Lookup and
    growth are thread-safe, but threads must not share a name. A copy, deep or pickled, starts
    without buffers.

    Attributes:
        buffer: The one-dimensional tensors of the buffers, by ``(name, dtype, device)``. It is
            read-only: ``release()`` removes entries.

    Example:
        >>> buffers = GlobalMemoryBuffer()
        >>> large = buffers.get_tensor((2, 3), torch.float32, "scratch", device="cpu")
        >>> small = buffers.get_tensor(4, torch.float32, "scratch", device="cpu")
        >>> large.shape, small.shape, small.data_ptr() == large.data_ptr()
        (torch.Size([2, 3]), torch.Size([4]), True)
    """

    def __init__(self) -> None:
        self.buffer: dict[_Key, Tensor] = {}
        self._views: dict[_Key, _Views] = {}
        self._lock = threading.RLock()
        self._frozen = False
        _instances.add(self)

    def __reduce__(self) -> tuple[type[GlobalMemoryBuffer], tuple[()]]:
        return type(self), ()

    def get_tensor(
        self,
        tensor_shape: Iterable[int] | int,
        dtype: torch.dtype,
        name: Hashable,
        mem_alloc_context: _AllocationContext | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> Tensor:
        """Return a tensor on the start of a buffer, which is allocated or enlarged if necessary.

        While a ``FakeTensorMode`` is active, and on the meta device, it returns a new tensor and
        keeps nothing. A buffer first requested in inference mode is a normal tensor outside it.
        Works in ``torch.compile(fullgraph=True)``, on the same memory.

        Args:
            tensor_shape: The shape: integers (zeros allowed, empty for a 0-d tensor) or a single
                integer. An iterator is read once.
            dtype: The element type.
            name: The name of the buffer, any hashable object.
            mem_alloc_context: A callable without arguments that returns a context manager. It is
                called and entered only around an allocation.
            device: The device of the buffer, by default the current device.

        Returns:
            An uninitialised contiguous tensor that has no ``_base`` and does not require grad.

        Raises:
            ValueError: The shape has a negative entry.
            TypeError: The shape contains something other than integers, or ``mem_alloc_context`` is
                a context manager instead of a callable that makes one.
            RuntimeError: The buffer would have to grow and is frozen.

        Example:
            >>> GlobalMemoryBuffer().get_tensor((), torch.int64, "step", device="cpu").ndim
            0
        """
        if type(tensor_shape) is tuple and _INT.issuperset(map(type, tensor_shape)):
            shape = tensor_shape  # a known shape has no negative entries
        else:
            shape = checked_shape(tensor_shape)
        # An object made by @contextmanager is callable too (as a decorator): check both.
        if mem_alloc_context is not None and (
            not callable(mem_alloc_context) or hasattr(type(mem_alloc_context), "__enter__")
        ):
            raise TypeError(
                "mem_alloc_context must be a callable without arguments that returns a context "
                f"manager, got {mem_alloc_context!r}: pass the function that makes it, or a lambda"
            )
        if _is_dynamo_compiling():
            key = (name, dtype, resolve_device(device))
            return self._make_view(key, shape, mem_alloc_context)
        untracked = traced_device(device)
        if untracked is not None:
            return torch.empty(checked_shape(shape), dtype=dtype, device=untracked)
        key = (name, dtype, resolve_device(device))
        with self._lock:
            views = self._views.get(key)
            view = None
            if views is not None and views.backing is self.buffer.get(key):
                view = views.by_shape.get(shape)
            if view is None:
                del views  # it would keep the old buffer alive while a bigger one is allocated
                view = self._make_kept_view(key, shape, mem_alloc_context)
            return view.detach()

    def reserve(
        self,
        tensor_shape: Iterable[int] | int,
        dtype: torch.dtype,
        name: Hashable,
        mem_alloc_context: _AllocationContext | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Allocate or enlarge a buffer ahead of its use, before :meth:`freeze` for example.

        Args:
            tensor_shape: The largest shape that will be requested.
            dtype: The element type.
            name: The name of the buffer.
            mem_alloc_context: As for :meth:`get_tensor`.
            device: The device of the buffer, by default the current device.

        Raises:
            ValueError, TypeError, RuntimeError: As :meth:`get_tensor`.

        Example:
            >>> buffers = GlobalMemoryBuffer()
            >>> buffers.reserve((8, 4), torch.float32, "scratch", device="cpu")
            >>> buffers.nbytes("scratch")
            128
        """
        self.get_tensor(tensor_shape, dtype, name, mem_alloc_context, device=device)

    def nbytes(self, name: Hashable = _ANY) -> int:
        """Return the memory of the buffers.

        Args:
            name: The name of the buffers to count, in every dtype and on every device. All buffers
                if omitted.

        Returns:
            The memory in bytes.

        Example:
            >>> GlobalMemoryBuffer().nbytes()
            0
        """
        with self._lock:
            return sum(
                backing.nbytes for key, backing in self.buffer.items() if name in (_ANY, key[0])
            )

    def release(
        self,
        name: Hashable = _ANY,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> int:
        """Drop buffers. Their memory is freed once the returned tensors are gone too.

        Args:
            name: The name of the buffers to drop, any if omitted. None is a name.
            dtype: The element type of the buffers to drop, None for any.
            device: The device of the buffers to drop, None for any.

        Returns:
            The memory of the dropped buffers in bytes.

        Raises:
            RuntimeError: A buffer would be dropped and the buffers are frozen.

        Example:
            >>> buffers = GlobalMemoryBuffer()
            >>> buffers.reserve(16, torch.uint8, "scratch", device="cpu")
            >>> buffers.release("scratch")
            16
        """
        wanted = None if device is None else resolve_device(device)
        with self._lock:
            keys = [
                key
                for key in self.buffer
                if name in (_ANY, key[0]) and dtype in (None, key[1]) and wanted in (None, key[2])
            ]
            if keys and self._frozen:
                raise RuntimeError(
                    f"the buffers are frozen, so {[key[0] for key in keys]} cannot be released: "
                    "call unfreeze() first"
                )
            return sum(self._drop(key) for key in keys)

    def freeze(self) -> None:
        """Make requests that would move memory fail, as captured graphs require.

        A captured CUDA graph keeps the raw address of a buffer: growing the buffer later would free
        memory to which the graph still writes.

        Example:
            >>> buffers = GlobalMemoryBuffer()
            >>> buffers.freeze()
            >>> buffers.unfreeze()
        """
        self._frozen = True

    def unfreeze(self) -> None:
        """Allow buffers to grow.

        Example:
            >>> GlobalMemoryBuffer().unfreeze()
        """
        self._frozen = False

    @contextlib.contextmanager
    def frozen(self) -> Iterator[GlobalMemoryBuffer]:
        """Freeze the buffers within a ``with`` block, then restore the state from before it.

        Yields:
            The buffers.

        Example:
            >>> with GlobalMemoryBuffer().frozen() as buffers:
            ...     buffers.nbytes()
            0
        """
        before = self._frozen
        self._frozen = True
        try:
            yield self
        finally:
            self._frozen = before

    def _make_kept_view(
        self, key: _Key, shape: tuple[int, ...], mem_alloc_context: _AllocationContext | None
    ) -> Tensor:
        """Return a new view, kept for the next request of its shape."""
        view = self._make_view(key, shape, mem_alloc_context)
        backing = self.buffer.get(key)
        if backing is not None and not is_transform_wrapper(view):
            views = self._views.get(key)
            if views is None or views.backing is not backing or len(views.by_shape) >= _MAX_SHAPES:
                views = self._views[key] = _Views(backing, {})
            views.by_shape[shape] = view
        return view

    def _make_view(
        self, key: _Key, shape: tuple[int, ...], mem_alloc_context: _AllocationContext | None
    ) -> Tensor:
        numel = math.prod(checked_shape(shape))
        backing = self._get_backing(key, numel, mem_alloc_context)
        with torch.inference_mode(False):
            return backing[:numel].view(shape).detach()

    def _get_backing(
        self, key: _Key, numel: int, mem_alloc_context: _AllocationContext | None
    ) -> Tensor:
        name, dtype, device = key
        backing = self.buffer.get(key)
        if backing is not None and backing.numel() >= numel:
            return backing
        # Not nbytes: torch.compile cannot read it if it traces the size of the buffer as symbolic.
        old_bytes = 0 if backing is None else backing.numel() * dtype.itemsize
        del backing  # freed before the bigger buffer is allocated, to keep the peak low
        if self._frozen and numel > 0:
            raise RuntimeError(
                f"the buffers are frozen and buffer {name!r} ({dtype}, {device}) would grow from "
                f"{old_bytes} to {numel * dtype.itemsize} bytes: reserve() the largest shape "
                "before freeze(), or call unfreeze()"
            )
        context = contextlib.nullcontext() if mem_alloc_context is None else mem_alloc_context()
        # torch.compile cannot trace hasattr of its null context, so that is not checked.
        if mem_alloc_context is not None and not hasattr(context, "__enter__"):
            raise TypeError(
                f"mem_alloc_context must return a context manager, got {type(context).__name__}"
            )
        self._drop(key)
        # Not an inference tensor: the buffer outlives the mode of its first request.
        with context, torch.inference_mode(False):
            fresh = torch.empty(numel, dtype=dtype, device=device)
        # A tensor of an active transform is not kept: it would be dead after the transform.
        if not (fresh.is_meta or is_transform_wrapper(fresh)):
            self.buffer[key] = fresh
        return fresh

    def _drop(self, key: _Key) -> int:
        self._views.pop(key, None)
        backing = self.buffer.pop(key, None)
        return 0 if backing is None else backing.numel() * backing.itemsize


_of_process: dict[str, GlobalMemoryBuffer] = {}  # at most one
_instances: weakref.WeakSet[GlobalMemoryBuffer] = weakref.WeakSet()


def _start_child() -> None:
    """Drop the buffers of the process, and the locks that threads of the parent may hold."""
    _of_process.clear()
    for buffers in _instances:
        buffers._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_child)


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the memory buffers of the process, which are created at the first call.

    Safe in several threads. A forked child starts with its own empty instance. Call it once before
    ``torch.compile(fullgraph=True)`` compiles a call, since compiled code cannot create them.

    Returns:
        The same instance at every call, until ``destroy_global_memory_buffer()``.

    Example:
        >>> get_global_memory_buffer() is get_global_memory_buffer()
        True
    """
    buffers = _of_process.get("buffers")
    if buffers is None:
        buffers = _of_process.setdefault("buffers", GlobalMemoryBuffer())
    return buffers


def destroy_global_memory_buffer() -> None:
    """Drop the memory buffers of the process. The next call that needs them makes new ones.

    Without buffers it does nothing. Memory is freed once the returned tensors are gone too.

    Example:
        >>> before = get_global_memory_buffer()
        >>> destroy_global_memory_buffer()
        >>> get_global_memory_buffer() is before
        False
    """
    _of_process.clear()


def checked_shape(tensor_shape: Iterable[int] | int) -> tuple[int, ...]:
    """Return a shape as a tuple of integers. Symbolic sizes stay symbolic."""
    try:
        if isinstance(tensor_shape, Tensor):
            raise TypeError("a tensor would have to be read")
        entries: Any = tensor_shape if isinstance(tensor_shape, Iterable) else (tensor_shape,)
        # Not operator.index of a symbolic size: torch.compile would compile each size separately.
        shape: tuple[Any, ...] = tuple(
            n if isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in entries
        )
    except TypeError as error:
        raise TypeError(
            "tensor_shape must be an integer or a sequence of integers, "
            f"got {type(tensor_shape).__name__} {tensor_shape!r}"
        ) from error
    if any(n < 0 for n in shape):
        raise ValueError(f"tensor_shape must not have negative entries, got {shape}")
    return shape
