"""The end of a rank: a signal, the death of its launcher, or an error and its exit code."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from mcore.observe.files import replacing
from mcore.parallel.checkpoint import CheckpointingException
from pretrain.cli.handshake import LAUNCHER, PRIVATE_FOLDER
from pretrain.run.checkpoints import describe_latest
from pretrain.run.loop import DivergedError, RunFolderError, StoppedBySignal
from pretrain.run.saving import ReplicasDifferError
from pretrain.run_folder import RunFolder
from pretrain.usage import EXIT_DIVERGED, EXIT_FOLDER, EXIT_USAGE, UsageError

LAST_CALL_S = 2.5
_LOOK_EVERY_S = 0.5
_AGAIN_S = 1.0  # a signal that follows sooner is the launcher's copy of the first
_LAUNCHER_GONE = signal.SIGHUP
_EXIT_FAILED = 1
_WAIT_FOR_CULPRIT_S = 2.0
_CONNECTION_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe")
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
        self.last_call: Callable[[], None] = lambda: None
        # The launcher may have died before this line: then the parent is another process by now.
        self._launcher = int(os.environ.pop(LAUNCHER, os.getppid()))
        self._private_folder = os.environ.get(PRIVATE_FOLDER)
        if self._private_folder is not None:
            # Nobody removes the folder while this rank makes its store there: torch would try for
            # minutes and let no other thread run.
            with contextlib.suppress(FileNotFoundError):
                self._folder_lock = os.open(self._private_folder, os.O_RDONLY)
                fcntl.flock(self._folder_lock, fcntl.LOCK_SH)
            if not os.path.exists(self._private_folder):
                os._exit(128 + _LAUNCHER_GONE)
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
                if self._private_folder is not None:  # the launcher would have removed it
                    with contextlib.suppress(BlockingIOError):  # the last rank removes it
                        fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(self._private_folder, ignore_errors=True)
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


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler installed, Python writes the number to the pipe."""


def end_after(error: BaseException, folder: RunFolder | None) -> int:
    """Report an error and return the exit code.

    Errors that all ranks raise together are reported once, and the others wait for the report. An
    unexpected error ends this process at once, because other ranks may be dead.
    """
    if isinstance(error, StoppedBySignal):
        return int(str(error.code))
    if isinstance(error, DivergedError) and folder is not None:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError), replacing(folder.diverged) as file:
                file.write(f"{error}\n".encode())
        text = f"{error}. {describe_latest(folder, error.remedy)}"
        return _refuse(RuntimeError(text), EXIT_DIVERGED)
    if isinstance(error, RunFolderError) and folder is not None:
        more = "" if folder.is_gone() else f". {describe_latest(folder)}"
        return _refuse(RunFolderError(f"{error}{more}"), EXIT_FOLDER)
    if isinstance(error, UsageError):
        return _refuse(error, EXIT_USAGE)
    if isinstance(error, (CheckpointingException, ReplicasDifferError)):
        return _refuse(error, _EXIT_FAILED)
    return _leave_after(error)


def _refuse(error: Exception, exit_code: int) -> int:
    """Report once the error that all ranks have raised. The other ranks wait for the report."""
    try:
        dist.barrier()  # print earlier logs of all ranks first
        if dist.get_rank() == 0:
            print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        dist.barrier()
    except RuntimeError:
        _leave_after(error)  # a rank has died
    return exit_code


def _leave_after(error: BaseException) -> NoReturn:
    """Print the error and end the process, without waiting for ranks that may be dead."""
    words = "" if isinstance(error, OSError) else str(error).lower()  # an OSError is local
    lost_peer = any(sign in words for sign in _CONNECTION_WORDS)
    if lost_peer:
        # Gives the launcher time to see the peer that failed first.
        time.sleep(_WAIT_FOR_CULPRIT_S)
        print(f"pretrain: rank {dist.get_rank()} lost its peer", file=sys.stderr, flush=True)
    else:
        text = "".join(traceback.format_exception(error))
        print(f"pretrain: rank {dist.get_rank()} failed:\n{text}", file=sys.stderr, flush=True)
    os._exit(_EXIT_FAILED)
