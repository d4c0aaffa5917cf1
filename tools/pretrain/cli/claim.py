"""The lock that gives a run folder to one job."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from mcore.observe.files import open_plain
from pretrain.run_folder import LOCK_NAME
from pretrain.usage import UsageError

# A restarted job waits this long for the previous one: ranks outlive their launcher.
PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.1
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}


def claim(folder: Path, patience_s: float = 0.0) -> IO[str]:
    """Lock a run folder until the returned file is closed or this process ends.

    Waits ``patience_s`` seconds for another job's lock, then raises UsageError with the host and
    process of that job. On a file system without locks nothing is locked.
    """
    path = folder / LOCK_NAME
    try:
        number = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.fchmod(number, 0o600)  # a reader of the file could hold the lock
        file = open(number, "a+")  # noqa: SIM115  # open until the process ends
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    _lock(file, fcntl.LOCK_EX, folder, patience_s)
    file.truncate(0)
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
    file.flush()
    return file


def check_unclaimed(folder: Path, patience_s: float = 0.0) -> None:
    """Raise UsageError if a job holds the folder for longer than ``patience_s``. Locks nothing."""
    path = folder / LOCK_NAME
    try:
        number = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    with open(number) as file:
        _lock(file, fcntl.LOCK_SH, folder, patience_s)


def _lock(file: IO[str], kind: int, folder: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    owner = os.pread(file.fileno(), 1000, 0)
    file.close()
    raise UsageError(f"{folder} is in use by another job ({_describe_owner(owner)})")


def still_ours(folder: Path) -> Callable[[], bool]:
    """Return a function: whether no later job has claimed the folder, as after a frozen process."""
    before = _read_claim(folder)
    return lambda: _read_claim(folder) == before


def _read_claim(folder: Path) -> tuple[str, float] | None:
    try:
        with (folder / LOCK_NAME).open() as file:
            return file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def is_of_this_launcher(folder: Path, name: str = LOCK_NAME) -> bool:
    """Whether a job has written this file since the launcher started, which restarts this rank.

    False on systems without /proc.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        ticks = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        written = (folder / name).stat().st_mtime
    except (OSError, ValueError):
        return False
    # The btime of /proc/stat drops the part of a second: too early by up to one.
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return written > booted + int(ticks) / os.sysconf("SC_CLK_TCK")


def _describe_owner(owner: bytes) -> str:
    try:
        facts = json.loads(owner)
        return f"host {facts['host']}, process {facts['pid']}"[:200]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown host"
