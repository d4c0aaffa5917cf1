"""Why a run stops early: a signal that all ranks agree on, or gradients that are not finite."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_CHECK_EVERY_S = 0.25
_MOST_STEPS = 1000


class StoppedBySignal(SystemExit):
    """The ranks stopped together after a step and have saved it; its code is 128 + the signal."""


class DivergedError(Exception):
    """Too many steps in a row had gradients that were not finite."""


class StopAgreement:
    """Finds out whether any rank was asked to stop; all ranks call :meth:`agreed` after each step.

    One all-reduce of two numbers about four times a second, since a rank that stopped by itself
    would leave the others in a collective.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left = self._interval = 1
        self._began = time.perf_counter()

    def agreed(self, signal: int) -> int:
        """Return the signal that some rank was sent, 0 for none or where it is not yet asked."""
        self._left -= 1
        if self._left:
            return 0
        passed = time.perf_counter() - self._began
        steps = int(_CHECK_EVERY_S * self._interval / max(passed, 1e-9))
        facts = torch.tensor([signal, max(1, min(steps, _MOST_STEPS))], device=self._device)
        dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        found, self._interval = (int(fact) for fact in facts.tolist())
        self._left, self._began = self._interval, time.perf_counter()
        return found
