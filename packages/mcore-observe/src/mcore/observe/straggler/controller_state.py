"""What the detector and its HTTP controller share: the state wanted, and the last report."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore.observe.straggler.report import StragglerReport

__all__ = ["ControllerState", "ControllerStatus"]


@dataclass(frozen=True)
class ControllerStatus:
    """A snapshot of the detector for those who ask over HTTP.

    Attributes:
        enabled: Whether ranges are timed now.
        pending: The state after the next report where it is another one, else None.
        rank: The rank given to ``configure``.
        world_size: The number of ranks.
        reports: How many reports were made so far.
        last_report_unix: When the last one was made, in seconds since 1970; None before the first.
    """

    enabled: bool
    pending: bool | None
    rank: int
    world_size: int
    reports: int
    last_report_unix: float | None


class ControllerState:
    """Holds which state is wanted until the next report applies it. Any thread may call it.

    Args:
        rank: The rank given to ``configure``.
        world_size: The number of ranks.
        enabled: Whether ranges are timed at the start.

    Example:
        >>> state = ControllerState(rank=0, world_size=1, enabled=False)
        >>> state.toggle(), state.status().pending
        (True, True)
        >>> state.toggle(), state.status().pending
        (False, None)
    """

    def __init__(self, *, rank: int, world_size: int, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._rank = rank
        self._world_size = world_size
        self._enabled = enabled
        self._wanted = enabled
        self._reports = 0
        self._last_report: StragglerReport | None = None

    @property
    def last_report(self) -> StragglerReport | None:
        """The last report; None before the first."""
        with self._lock:
            return self._last_report

    def status(self) -> ControllerStatus:
        """Return a snapshot of the state."""
        with self._lock:
            return ControllerStatus(
                enabled=self._enabled,
                pending=None if self._wanted == self._enabled else self._wanted,
                rank=self._rank,
                world_size=self._world_size,
                reports=self._reports,
                last_report_unix=self._last_report.unix_time if self._last_report else None,
            )

    def request(self, wanted: bool) -> bool:
        """Ask for a state from the next report on; the last request counts.

        Args:
            wanted: True to time ranges.

        Returns:
            The state wanted now.
        """
        with self._lock:
            self._wanted = wanted
            return wanted

    def toggle(self) -> bool:
        """Ask for the other state; a second call before the next report takes it back.

        Returns:
            The state wanted now.
        """
        with self._lock:
            self._wanted = not self._wanted
            return self._wanted

    def wanted(self) -> bool:
        """Return the state wanted after the next report."""
        with self._lock:
            return self._wanted

    def applied(self, enabled: bool, report: StragglerReport | None) -> None:
        """Take note of what a report decided.

        A request made while that report was under way stays for the next one.

        Args:
            enabled: The state that all ranks have now.
            report: What was measured; None where nothing was, as while off.
        """
        with self._lock:
            self._enabled = enabled
            if report is not None:
                self._last_report = report
                self._reports += 1
