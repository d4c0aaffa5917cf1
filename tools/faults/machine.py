"""The machine of a campaign: a small disk, processes that end with it, and delays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

DISK_BYTES = 48 << 20
MARK = "FAULTS_CAMPAIGN"  # in the environment of all processes of a campaign
_BEAT_S = 0.05
_SCANS = 3
_BETWEEN_SCANS_S = 0.2


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A tmpfs of 48 MiB, for this process and its children. None if not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def end_all_with_this_process() -> None:
    """Kill all processes started from here on when this process ends, even by SIGKILL.

    A separate process waits for that. It finds them by their environment, so it also kills servers
    in other sessions. SIGINT, SIGTERM and SIGHUP end this process immediately.
    """
    plain = dict(os.environ)
    os.environ[MARK] = uuid.uuid4().hex
    reading, writing = os.pipe()
    subprocess.Popen(
        [sys.executable, "-m", "faults.machine", os.environ[MARK]], stdin=reading, env=plain,
        start_new_session=True,
    )  # fmt: skip
    os.close(reading)
    os.set_inheritable(writing, False)  # it is closed when this process ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    print(f"faults: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _wait_and_kill(mark: str) -> None:
    """Wait for the end of the parent process, then kill the processes that it started."""
    while sys.stdin.buffer.read(1):
        pass
    wanted = f"{MARK}={mark}".encode()
    without_any = 0
    while without_any < _SCANS:
        found = list(processes_with(wanted))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        without_any = 0 if found else without_any + 1
        time.sleep(_BETWEEN_SCANS_S)


def processes_with(*variables: bytes) -> Iterator[int]:
    """Processes that were started with these variables in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {*variables} <= {*(path / "environ").read_bytes().split(b"\0")}:
                yield int(path.name)


class Lateness:
    """A thread that sleeps briefly and measures how late it wakes up.

    It waits for a core like ranks do, so it measures the machine's share in a delay.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        threading.Thread(target=self._measure, name="lateness", daemon=True).start()

    def between(self, begin: float, end: float) -> float:
        """Seconds lost between two times of ``time.time()``."""
        return sum(late for at, late in self._late if begin <= at <= end)

    def _measure(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(_BEAT_S)
            late = time.monotonic() - before - _BEAT_S
            if late > _BEAT_S:
                self._late.append((time.time(), late))


if __name__ == "__main__":
    _wait_and_kill(sys.argv[1])
