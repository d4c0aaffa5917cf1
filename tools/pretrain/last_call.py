"""What a rank still does when a signal ends it, even while it waits for other ranks."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_LONGEST_S = 2.5  # the launcher ends ranks for good after 3 s
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def call_before_a_signal_ends_us(action: Callable[[], None]) -> None:
    """Have SIGINT and SIGTERM end this process with 128 + signal, after an action of seconds.

    Python's own handlers would wait for the main thread, which may be in a collective.

    Args:
        action: called in a thread; it gets two and a half seconds.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in _SIGNALS:
        signal.signal(number, _leave_it_to_the_thread)
    threading.Thread(target=_end, args=(reading, action), name="last call", daemon=True).start()


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: that there is a handler has the number written to the pipe."""


def _end(reading: int, action: Callable[[], None]) -> None:
    number = os.read(reading, 1)[0]
    logging.disable()  # what fails from here on fails because the process ends
    worker = threading.Thread(target=action, daemon=True)
    worker.start()
    worker.join(_LONGEST_S)
    os._exit(128 + number)
