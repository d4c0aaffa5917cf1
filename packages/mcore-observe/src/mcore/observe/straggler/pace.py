"""Reports every so many seconds: after the same step on all ranks."""

from __future__ import annotations

import time

_FIRST_STEPS = 16


class Pace:
    """Turns seconds into a number of steps, which all ranks agree on with each report.

    The first report comes after 16 steps; it shows how long a step takes.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._interval = _FIRST_STEPS
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0

    def step(self, flops: float) -> bool:
        """Count a step and its operations; return whether a report is due."""
        self.steps += 1
        self.flops += flops
        return self.steps >= self._interval

    def wanted_interval(self) -> int:
        """Return how many steps this rank takes in the time between reports, by the last ones."""
        took_s = time.monotonic() - self._began
        return max(1, round(self.steps * self._every_s / took_s)) if took_s > 0 else _FIRST_STEPS

    def restart(self, interval: int) -> None:
        """Begin to count the agreed number of steps."""
        self._interval = max(1, interval)
        self._began = time.monotonic()
        self.steps, self.flops = 0, 0.0
