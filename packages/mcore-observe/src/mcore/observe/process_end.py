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

from mcore.observe.secrets import mask_secrets

logger = logging.getLogger(__name__)

_EXIT_CODE_AFTER_SIGTERM = 128 + signal.SIGTERM


def status_of(error: BaseException | None) -> str:
    """Return the status of a piece of work, given the exception that ended it.

    Args:
        error: The exception, or None.

    Returns:
        ``"FINISHED"`` for None and for SystemExit with code 0 or None, ``"KILLED"`` for
        KeyboardInterrupt and for the SystemExit that SIGTERM causes, else ``"FAILED"``.

    Example:
        >>> status_of(None), status_of(SystemExit(1)), status_of(SystemExit(0))
        ('FINISHED', 'FAILED', 'FINISHED')
    """
    if error is None:
        return "FINISHED"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "FINISHED"
        return "KILLED" if error.code == _EXIT_CODE_AFTER_SIGTERM else "FAILED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


def on_process_end(callback: Callable[[str], None]) -> Callable[[], None]:
    """Call a function with the status when the interpreter exits; return what cancels that.

    ``os._exit`` and SIGKILL call nothing, and ``sys.exit`` with an error code looks finished here.
    """
    _WATCH.install()
    _WATCH.callbacks.append(callback)

    def cancel() -> None:
        if callback in _WATCH.callbacks:
            _WATCH.callbacks.remove(callback)

    return cancel


class _ProcessWatch:
    """Watches how the process ends; does nothing before ``install``."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[str], None]] = []
        self._status = "FINISHED"
        self._installed_in: int | None = None

    def install(self) -> None:
        """Link into ``sys.excepthook``, and have SIGTERM, unless it has a handler, exit cleanly."""
        if self._installed_in is not None:
            return
        self._installed_in = os.getpid()
        atexit.register(self._run_callbacks)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._note_exception
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note_sigterm)

    def _note_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._status = status_of(error)
        self._previous_hook(kind, error, traceback)

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._installed_in:  # a forked child: die as it would have without us
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._status = "KILLED"
        raise SystemExit(_EXIT_CODE_AFTER_SIGTERM)

    def _run_callbacks(self) -> None:
        if os.getpid() != self._installed_in:
            return
        for callback in reversed(tuple(self.callbacks)):
            try:
                callback(self._status)
            except Exception:
                text = mask_secrets(traceback.format_exc())
                logger.error("an end-of-process callback failed\n%s", text)


_WATCH = _ProcessWatch()
