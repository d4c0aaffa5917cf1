"""Turns the timing of ranges on and off, also in the middle of a range."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, TypeVar

from mcore.observe.straggler.samples import NUM_KEPT
from mcore.observe.straggler.timing import (
    COMPUTE_KIND,
    DATA_KIND,
    UNTIMED,
    Entry,
    HostRanges,
    ThreadRanges,
)

__all__ = ["RangeSwitch"]

_Self = TypeVar("_Self", bound="RangeSwitch")


class RangeSwitch:
    """Times the bodies of with statements while on: the part of the detector that training calls.

    While off, and outside ranges that were opened while on, entering and leaving is one check of
    one attribute. A range that is open when timing is turned off is still closed and kept; the
    entries inside it only keep the order.

    Attributes:
        start: Opens a range while on, else does nothing.
        stop: Closes it while on, else does nothing.

    Example:
        >>> switch = RangeSwitch()
        >>> switch._use_ranges(HostRanges())
        >>> switch._set_enabled(True)
        >>> with switch(bdata=True):
        ...     pass
        >>> switch._ranges.take()[DATA_KIND].count
        1
    """

    start: Callable[[], None]
    stop: Callable[[], None]
    _off: bool
    _idle: bool  # off, and no range is open
    _begin: Callable[[ThreadRanges, int], Entry] | None  # None: read the host's clock, no more

    def __init__(self) -> None:
        self._use_ranges(HostRanges())

    @property
    def enabled(self) -> bool:
        """Whether ranges are timed now; a requested change comes at the end of a report."""
        return not self._off

    @property
    def bdata(self) -> bool:
        """Whether this thread's next range is a data range."""
        return self._local.ranges.mark == DATA_KIND

    def __call__(self: _Self, bdata: bool = False) -> _Self:
        """Say what this thread's next range is.

        Args:
            bdata: True for a data range, which is timed by the host's clock alone.

        Returns:
            The instance.
        """
        if not self._idle:
            self._local.ranges.mark = DATA_KIND if bdata else COMPUTE_KIND
        return self

    def __enter__(self: _Self) -> _Self:
        """Open a range while on. Never waits.

        Returns:
            The instance.
        """
        # This and __exit__ are what training pays for, so the common case is written out here.
        if self._idle:
            return self
        ranges = self._local.ranges
        if ranges.mark or self._begin is not None:
            kind, ranges.mark = ranges.mark, COMPUTE_KIND
            self._push(ranges, kind)
        else:
            ranges.stack.append(self._now_ns())
        return self

    def __exit__(
        self,
        ex_type: type[BaseException] | None,
        ex_val: BaseException | None,
        ex_tb: TracebackType | None,
    ) -> Literal[False]:
        """Close the range; one that an exception leaves is dropped.

        Args:
            ex_type: Of the exception, or None.
            ex_val: The exception, or None.
            ex_tb: Its traceback, or None.

        Returns:
            False: the exception goes on.
        """
        if self._idle:
            return False
        ended_ns = self._now_ns()
        ranges = self._local.ranges
        try:
            opened = ranges.stack.pop()
        except IndexError:  # not opened, or while timing was off
            return False
        # isinstance would take 6 % of the time of a range more.
        if type(opened) is int and ex_type is None:
            pending = ranges.compute
            pending.append(ended_ns - opened)
            if len(pending) >= NUM_KEPT:
                self._ranges.fold(COMPUTE_KIND, pending)
        elif type(opened) is tuple:
            kind, began_ns, events = opened
            if ex_type is not None:
                self._ranges.give_back((opened,))
            elif events is not None:
                self._ranges.end(ranges, opened, ended_ns)
            elif began_ns is not None:
                self._ranges.add(ranges, kind, ended_ns - began_ns)
        if self._off:
            self._settle()
        return False

    def start_method(self) -> None:
        """Open a range: of compute, or of data after ``detector(bdata=True)``. Never waits.

        Does nothing while off.
        """
        self.__enter__()

    def stop_method(self) -> None:
        """Close this thread's innermost range. Never waits.

        Does nothing while off, or without an open range.
        """
        self.__exit__(None, None, None)

    def null_method(self) -> None:
        """Do nothing: what ``start`` and ``stop`` are while off."""

    def reset(self) -> None:
        """Drop all samples; their events go back to the pool. Does nothing while off."""
        if not self._off:
            self._ranges.reset()

    def _enter_kind(self, kind: int) -> None:
        """Open a range of a given kind and leave the mark."""
        if not self._idle:
            ranges = self._local.ranges
            ranges.make_room(kind)
            self._push(ranges, kind)

    def _push(self, ranges: ThreadRanges, kind: int) -> None:
        begin = self._begin
        ranges.stack.append((kind, self._now_ns(), None) if begin is None else begin(ranges, kind))

    def _use_ranges(self, ranges: HostRanges) -> None:
        """Take what times ranges, and turn it off."""
        self._ranges = ranges
        self._local = ranges.local
        self._now_ns = ranges.now_ns
        self._set_enabled(False)

    def _set_enabled(self, enabled: bool) -> None:
        self._off = not enabled
        if enabled:
            self._ranges.switched_on()
            self.start, self.stop = self.start_method, self.stop_method
            self._begin = self._ranges.begin if self._ranges.has_begin else None
        else:
            self.start = self.stop = self.null_method
            self._begin = _untimed
            self._ranges.clear_marks()
        self._settle()

    def _settle(self) -> None:
        self._idle = self._off and not self._ranges.has_open()


def _untimed(ranges: ThreadRanges, kind: int) -> Entry:
    """What an entry leaves that is inside an open range while timing is off."""
    return UNTIMED
