"""The machine under a campaign: a small disk, processes that end with it, and when it was late."""

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
MARK = "FAULTS_CAMPAIGN"  # in the environment of all that a campaign starts
_BEAT_S = 0.05
_SCANS = 3
_BETWEEN_SCANS_S = 0.2


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of 48 MiB in memory, seen by this process and those it starts; else None."""
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
    """Have whatever is started from here on killed when this process ends, however it does.

    A process of its own waits for that, so that servers in sessions of their own end as well. A
    signal that asks this process to end does so at once.
    """
    plain = dict(os.environ)
    os.environ[MARK] = uuid.uuid4().hex
    reading, writing = os.pipe()
    subprocess.Popen(
        [sys.executable, "-m", "faults.machine", os.environ[MARK]],
        stdin=reading,
        env=plain,
        start_new_session=True,
    )
    os.close(reading)
    os.set_inheritable(writing, False)  # it is closed when this process ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    print(f"faults: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _wait_and_kill(mark: str) -> None:
    """Wait for the end of the process that started this one, then kill what it has started."""
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
    """Those that were started with such variables in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {*variables} <= {*(path / "environ").read_bytes().split(b"\0")}:
                yield int(path.name)


class Lateness:
    """A thread that sleeps for moments and notes how much too late it goes on.

    It waits for a core as ranks do, so that the machine's share in a delay is known.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        threading.Thread(target=self._measure, name="lateness", daemon=True).start()

    def between(self, begin: float, end: float) -> float:
        """Seconds that were lost between two times of ``time.time()``."""
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
