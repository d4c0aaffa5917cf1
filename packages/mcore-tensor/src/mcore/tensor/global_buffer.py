"""The memory buffers that a whole process shares."""

from __future__ import annotations

import os
import threading

from mcore.tensor.buffers import GlobalMemoryBuffer

__all__ = ["destroy_global_memory_buffer", "get_global_memory_buffer"]


class _ProcessWide:
    """The one instance of a process, made when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._instance: GlobalMemoryBuffer | None = None
        self._handles_fork = False

    def get(self) -> GlobalMemoryBuffer:
        instance = self._instance
        return self._create() if instance is None else instance

    def clear(self) -> None:
        with self._lock:
            self._instance = None

    def _create(self) -> GlobalMemoryBuffer:
        with self._lock:
            if self._instance is None:
                self._instance = GlobalMemoryBuffer()
                if not self._handles_fork and hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=self._forget)
                    self._handles_fork = True
            return self._instance

    def _forget(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        self._instance = None


_process_wide = _ProcessWide()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the memory buffers of the process, which are created at the first call.

    Safe in several threads. A forked child starts with an empty instance of its own.

    Returns:
        The same instance at every call, until `destroy_global_memory_buffer()`.

    Example:
        >>> get_global_memory_buffer() is get_global_memory_buffer()
        True
    """
    return _process_wide.get()


def destroy_global_memory_buffer() -> None:
    """Let go of the memory buffers of the process; the next call that needs them makes new ones.

    Calling it again does nothing. Memory is free once the tensors handed out are gone as well.

    Example:
        >>> before = get_global_memory_buffer()
        >>> destroy_global_memory_buffer()
        >>> get_global_memory_buffer() is before
        False
    """
    _process_wide.clear()
