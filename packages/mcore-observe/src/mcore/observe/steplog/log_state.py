"""What the training log remembers from one call to the next."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from mcore.observe.secrets import mask_secrets
from mcore.observe.sinks.trackers import SinkTable
from mcore.observe.steplog.experts import ExpertReport
from mcore.observe.steplog.interval import IntervalClock, IntervalFlops
from mcore.observe.steplog.timer_ticks import TimerTicks

__all__ = ["LOG_STATE", "LogState", "log_state_of"]

logger = logging.getLogger(__name__)

# The attribute of a GlobalState under which its LogState is kept.
LOG_STATE = "_training_log_state"


@dataclass
class LogState:
    """Memory of the training log of one GlobalState.

    Attributes:
        sinks: The guarded sinks.
        ticks: How far trackers have seen the timers.
        clock: Time since the last console line.
        flops: Operations since the last console line.
        experts: MoE and MTP metrics that wait for a report.
    """

    sinks: SinkTable = field(default_factory=SinkTable)
    ticks: TimerTicks = field(default_factory=TimerTicks)
    clock: IntervalClock = field(default_factory=IntervalClock)
    flops: IntervalFlops = field(default_factory=IntervalFlops)
    experts: ExpertReport = field(default_factory=ExpertReport)
    _warned: set[str] = field(default_factory=set)

    def warn_once(self, what: str, error: Exception) -> None:
        """Log a failure with level WARNING, the first time for each subject."""
        if what not in self._warned:
            self._warned.add(what)
            text = mask_secrets(str(error))
            logger.warning("%s failed: %s: %s", what, type(error).__name__, text)


def log_state_of(global_state: Any) -> LogState:
    """Return the memory that belongs to a state, made at the first call.

    Args:
        global_state: Any object that takes attributes.

    Returns:
        The same object at every call for the same state.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace()
        >>> log_state_of(state) is log_state_of(state)
        True
    """
    found = getattr(global_state, LOG_STATE, None)
    if not isinstance(found, LogState):
        found = LogState()
        setattr(global_state, LOG_STATE, found)
    return found
