"""The status with which a process ends, and callbacks that receive it."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from mcore.observe.sinks.secrets import mask_secrets

logger = logging.getLogger(__name__)

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def status_of(error: BaseException | None) -> str:
    """Return the status of a piece of work, given the exception that ended it.

    Args:
        error: The exception, or None.

    Returns:
        ``"FINISHED"`` for None and for SystemExit with code 0 or None, ``"KILLED"`` for
        KeyboardInterrupt and for a SystemExit with 128 + SIGINT, SIGTERM or SIGHUP, else
        ``"FAILED"``.

    Example:
        >>> status_of(None), status_of(SystemExit(1)), status_of(SystemExit(0))
        ('FINISHED', 'FAILED', 'FINISHED')
    """
    return _name_status(_find_code(error))


def exit_code_of(status: str) -> int:
    """Return the exit code of the process if it ends with a status, else the usual code.

    The exception that the calling thread handles, such as that of a ``with`` block, ends the
    process. 143 is 128 + SIGTERM, the exit code that a shell shows for a terminated process.
    """
    error = sys.exc_info()[1]
    code = _WATCH.code if error is None else _find_code(error)
    usual = {"FINISHED": 0, "KILLED": 143}.get(status, 1)
    return code if _name_status(code) == status else usual


def _find_code(error: BaseException | None) -> int:
    """Return the exit code of a process that an exception ends."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else int(error is not None)


def _name_status(code: int) -> str:
    # A shell reports a process that a signal ended with 128 + the signal's number.
    is_killed = code - 128 in (signal.SIGINT, *_SIGNALS)
    return "KILLED" if is_killed else "FAILED" if code else "FINISHED"


def on_process_end(callback: Callable[[str], None], *, first: bool = False) -> Callable[[], None]:
    """Call a function with the status when the interpreter exits.

    It is called before functions that others have registered with :mod:`atexit` so far. The
    latest callback is called first, after all ``first`` ones. ``os._exit`` and SIGKILL call
    nothing. ``raise SystemExit(1)`` outside a ``with`` block of a run appears as finished.

    Returns a function that cancels the call.
    """
    _WATCH.install()
    callbacks = _WATCH.first_callbacks if first else _WATCH.callbacks
    callbacks.append(callback)

    def cancel() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return cancel


class _ProcessWatch:
    """Watches how the process ends, and does nothing before ``install``."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[str], None]] = []
        self.first_callbacks: list[Callable[[str], None]] = []
        self.code = 0  # with which the process ends
        self._installed_in: int | None = None

    def install(self) -> None:
        """Replace ``sys.excepthook`` and ``sys.exit``, and make signals exit cleanly.

        SIGTERM and SIGHUP keep a handler that they have, and stay ignored if they are.
        """
        # atexit calls the latest first: registering anew puts ours before all others.
        atexit.unregister(self._run_callbacks)
        atexit.register(self._run_callbacks)
        if self._installed_in is not None:
            return
        self._installed_in = os.getpid()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._record_exception
        self._previous_exit: Callable[..., NoReturn] = sys.exit
        # SystemExit reaches no excepthook, and atexit functions do not get the exit code.
        sys.exit = self._record_exit
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._exit_on_signal)

    def _record_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self.code = _find_code(error)
        self._previous_hook(kind, error, traceback)

    def _record_exit(self, status: str | int | None = None, /) -> NoReturn:
        # In another thread sys.exit ends only that thread.
        if threading.current_thread() is threading.main_thread():
            self.code = _find_code(SystemExit(status))
        self._previous_exit(status)

    def _exit_on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._installed_in:  # a forked child: die as without this handler
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.code = 128 + signum
        raise SystemExit(128 + signum)

    def _run_callbacks(self) -> None:
        if os.getpid() != self._installed_in:  # the trackers belong to the parent process
            return
        for callback in reversed((*self.callbacks, *self.first_callbacks)):
            try:
                callback(_name_status(self.code))
            except Exception:
                text = mask_secrets(traceback.format_exc())
                logger.error("an end-of-process callback failed\n%s", text)


_WATCH = _ProcessWatch()
