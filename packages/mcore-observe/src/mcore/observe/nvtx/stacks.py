"""The ranges that each thread has open, innermost last."""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeAlias

from mcore.observe.nvtx.backends import RangeBackend

# What opened a range and has to close it, with what its `push` returned.
OpenRange: TypeAlias = "tuple[RangeBackend, Any]"


class RangeStack:
    """The names of one thread's open ranges, always in the same list, and the ranges themselves."""

    __slots__ = ("__weakref__", "messages", "opened")

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.opened: list[OpenRange] = []

    def close(self, message: str) -> bool:
        """Close the innermost range by the backend that opened it; False if it has another name."""
        messages = self.messages
        if not messages or messages[-1] != message:
            return False
        messages.pop()
        backend, handle = self.opened.pop()
        backend.pop(handle)
        return True

    def close_down_to(self, depth: int, opened: OpenRange) -> None:
        """Close a range, which is inside ``depth`` others, after those inside it; once only."""
        if depth < len(self.opened) and self.opened[depth] is opened:
            while len(self.messages) > depth:
                self.close(self.messages[-1])


class LivingStacks:
    """The stacks of all living threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stacks: weakref.WeakSet[RangeStack] = weakref.WeakSet()

    def new(self) -> RangeStack:
        """Make the stack of a thread."""
        stack = RangeStack()
        with self._lock:
            self._stacks.add(stack)
        return stack

    def any_open(self) -> bool:
        """Return whether any living thread has an open range."""
        with self._lock:
            return any(stack.messages for stack in self._stacks)


class ThreadStack(threading.local):
    """Holds the stack of the current thread, made when the thread first asks for it."""

    def __init__(self, living: LivingStacks) -> None:
        self.stack = living.new()
