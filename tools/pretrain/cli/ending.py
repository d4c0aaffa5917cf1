"""The end of a rank from outside: a signal, or the death of its launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

LAST_CALL_S = 2.5
_LOOK_EVERY_S = 0.5
_AGAIN_S = 1.0  # a signal that follows sooner is the launcher's copy of the first
_LAUNCHER_GONE = signal.SIGHUP
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def is_under_nohup() -> bool:
    """Whether SIGHUP is ignored: the process is meant to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class Ending:
    """Waits for a request to end in a thread, because the main thread may be in a collective.

    The first signal is stored in ``requested`` for the training loop, which can still save. After
    ``grace_s`` seconds, at a second signal, or after the launcher has died, the process calls
    ``last_call`` and exits with 128 + the signal.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.requested = 0
        self.last_call: Callable[[], None] = _nothing
        self._launcher = os.getppid()
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number == signal.SIGHUP and is_under_nohup():
                continue
            signal.signal(number, _leave_it_to_the_thread)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()

    def _watch(self) -> None:
        noted_at = 0.0
        while True:
            ready, _, _ = select.select([self._reading], [], [], _LOOK_EVERY_S)
            numbers = os.read(self._reading, 4096) if ready else b""
            now = time.monotonic()
            if os.getppid() != self._launcher:
                self._end(self.requested or _LAUNCHER_GONE)
            if self.requested:
                if now - noted_at > self.grace_s or (numbers and now - noted_at > _AGAIN_S):
                    self._end(self.requested)
            elif numbers:
                self.requested, noted_at = numbers[0], now
                if not self.grace_s:
                    self._end(self.requested)

    def _end(self, number: int) -> None:
        logging.disable()  # later errors are only consequences of the exit
        worker = threading.Thread(target=self.last_call, daemon=True)
        worker.start()
        worker.join(LAST_CALL_S)
        os._exit(128 + number)


def _nothing() -> None:
    """Do nothing at the end."""


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler installed, Python writes the number to the pipe."""
