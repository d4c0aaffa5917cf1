"""The ranges that each thread has open, innermost last."""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeAlias

from mcore.observe.nvtx_backends import RangeBackend

__all__ = ["LivingStacks", "OpenRange", "RangeStack", "ThreadStack"]

# What opened a range and has to close it, with what its `push` returned.
OpenRange: TypeAlias = "tuple[RangeBackend, Any]"


class RangeStack:
    """The open ranges of one thread.

    Attributes:
        messages: Their names, innermost last; always the same list.
        opened: The ranges, in the same order.
    """

    __slots__ = ("__weakref__", "messages", "opened")

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.opened: list[OpenRange] = []

    def close(self, message: str) -> bool:
        """Close the innermost range, by the backend that opened it.

        Args:
            message: Its name.

        Returns:
            False if the innermost range has another name, or there is none; nothing is closed.
        """
        messages = self.messages
        if not messages or messages[-1] != message:
            return False
        messages.pop()
        backend, handle = self.opened.pop()
        backend.pop(handle)
        return True

    def close_down_to(self, depth: int, opened: OpenRange) -> None:
        """Close a range after those inside it; nothing if it is closed already.

        Args:
            depth: How many ranges it is inside of.
            opened: The range itself.
        """
        if depth < len(self.opened) and self.opened[depth] is opened:
            while len(self.messages) > depth:
                self.close(self.messages[-1])


class LivingStacks:
    """The stacks of all living threads.

    Example:
        >>> living = LivingStacks()
        >>> stack = living.new()
        >>> living.any_open()
        False
    """

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
        """Say whether any living thread has an open range."""
        with self._lock:
            return any(stack.messages for stack in self._stacks)


class ThreadStack(threading.local):
    """Holds the stack of the current thread, made when the thread first asks for it.

    Args:
        living: Where the stacks are made.

    Attributes:
        stack: The current thread's.
    """

    def __init__(self, living: LivingStacks) -> None:
        self.stack = living.new()
