"""Context managers that time named sections."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from mcore.observe.straggler.range_switch import RangeSwitch
from mcore.observe.straggler.section_stats import SectionStats

__all__ = ["SectionTimer", "SectionTimers"]

logger = logging.getLogger("mcore.observe.straggler")

_MAX_UNDECLARED = 64


class SectionTimer:
    """Times the body of a with statement as a section. Threads may share it, and it nests.

    Args:
        switch: Opens and closes ranges.
        kind: The number of the section.

    Example:
        >>> switch = RangeSwitch()
        >>> switch._set_enabled(True)
        >>> with SectionTimer(switch, 2):
        ...     pass
        >>> switch._ranges.take()[2].count
        1
    """

    __slots__ = ("_kind", "_switch")

    def __init__(self, switch: RangeSwitch, kind: int) -> None:
        self._switch = switch
        self._kind = kind

    def __enter__(self) -> None:
        self._switch._enter_kind(self._kind)

    def __exit__(
        self,
        ex_type: type[BaseException] | None,
        ex_val: BaseException | None,
        ex_tb: TracebackType | None,
    ) -> None:
        self._switch.__exit__(ex_type, ex_val, ex_tb)


class SectionTimers:
    """The sections of a detector by name; those that were not declared are numbered as they come.

    Args:
        switch: Opens and closes ranges.
        names: The declared sections, with the built-in ones.

    Example:
        >>> timers = SectionTimers(RangeSwitch(), ["compute", "data"])
        >>> timers["data"] is timers["data"]
        True
    """

    def __init__(self, switch: RangeSwitch, names: Sequence[str]) -> None:
        self._switch = switch
        self._lock = threading.Lock()
        self._num_declared = len(names)
        self._has_warned_of_many = False
        self._timers = {name: SectionTimer(switch, kind) for kind, name in enumerate(names)}

    def __getitem__(self, name: str) -> AbstractContextManager[None]:
        """Return the timer of a section; ValueError for a name that is empty or not text."""
        timer = self._timers.get(name)
        return self._undeclared(name) if timer is None else timer

    def local_stats(self, stats: Mapping[int, SectionStats]) -> dict[str, SectionStats]:
        """Return the statistics of the sections that were not declared, by name."""
        names = list(self._timers)
        return {
            names[kind]: of_kind for kind, of_kind in stats.items() if kind >= self._num_declared
        }

    def _undeclared(self, name: str) -> AbstractContextManager[None]:
        if not isinstance(name, str) or not name:
            raise ValueError(f"section {name!r} has no name; give text that is not empty")
        with self._lock:
            if name in self._timers:  # another thread was faster
                return self._timers[name]
            if len(self._timers) >= self._num_declared + _MAX_UNDECLARED:
                return self._one_too_many(name)
            timer = SectionTimer(self._switch, len(self._timers))
            self._timers[name] = timer
        logger.warning(
            "straggler: section %r is not among the sections given to configure(); it is timed "
            "on this rank alone",
            name,
        )
        return timer

    def _one_too_many(self, name: str) -> AbstractContextManager[None]:
        if not self._has_warned_of_many:
            self._has_warned_of_many = True
            logger.warning(
                "straggler: section %r and others are not timed: there are %d sections already "
                "that were not given to configure()",
                name,
                _MAX_UNDECLARED,
            )
        return nullcontext()
