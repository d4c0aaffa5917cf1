"""Times named sections beside the ranges that are built in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from mcore.observe.straggler.range_switch import RangeSwitch
from mcore.observe.straggler.section_stats import SectionStats
from mcore.observe.straggler.section_timer import SectionTimers

__all__ = ["SectionSwitch"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class SectionSwitch(RangeSwitch):
    """Times named sections while on: the part of the detector that knows their names.

    Example:
        >>> switch = SectionSwitch()
        >>> switch._use_sections(("compute", "data", "optimizer"))
        >>> switch._set_enabled(True)
        >>> switch.wrap(sum, "optimizer")([1, 2])
        3
        >>> switch._ranges.take()[2].count
        1
    """

    _timers: SectionTimers | None = None

    def section(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a with statement under a name.

        Args:
            name: One of the ``sections`` given to :meth:`configure`, which all ranks compare. Any
                other is timed for ``local_sections`` of this rank's report, with one warning.

        Returns:
            A context manager; it does nothing while off.

        Raises:
            ValueError: An empty name.
        """
        return nullcontext() if self._timers is None else self._timers[name]

    def wrap(self, fn: Callable[_P, _R], name: str) -> Callable[_P, _R]:
        """Make a function whose calls are timed as a section.

        Args:
            fn: A function.
            name: The section, as for :meth:`section`.

        Returns:
            A function with the same signature.

        Raises:
            TypeError: ``fn`` is a coroutine function or a generator: ranges follow the calls of a
                thread, which those leave before they end.
        """
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
            raise TypeError(f"wrap() got {fn!r}, which suspends; use section() around plain calls")

        @functools.wraps(fn)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.section(name):
                return fn(*args, **kwargs)

        return timed

    def _use_sections(self, names: Sequence[str] | None) -> None:
        """Take the declared sections, with the built-in ones; None times no section."""
        self._timers = None if names is None else SectionTimers(self, names)

    def _local_stats(self, stats: Mapping[int, SectionStats]) -> dict[str, SectionStats]:
        """Return the statistics of the sections that were not declared, by name."""
        return {} if self._timers is None else self._timers.local_stats(stats)
