"""The figures of a save or a load: its size, the times of its phases, and a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from mcore.parallel.shortened import counted

_DELAY_S = 5  # shorter saves and loads show no bar


class SaveStats(NamedTuple):
    """The size and the times of a finished save, as measured on this rank.

    Attributes:
        num_bytes: Size of the checkpoint, in bytes.
        num_files: Number of its files.
        seconds: Duration of each phase, by name: ``describe``, ``decide``, ``copy`` (to the CPU, of
            an asynchronous save), ``write`` (with the wait for earlier saves and the slowest rank)
            and ``publish``.
        waited_s: How long training waited, in seconds. All of the save unless it is asynchronous.

    Example:
        >>> stats = SaveStats(2 * 10**9, 3, {"write": 3.5, "publish": 0.5}, 4.0)
        >>> stats.gb_per_s
        0.5
        >>> print(stats)
        2.00 GB in 3 files, 4.0 s (write 3.5, publish 0.5), 0.50 GB/s, training waited 4.0 s
    """

    num_bytes: int
    num_files: int
    seconds: Mapping[str, float]
    waited_s: float

    @property
    def gb_per_s(self) -> float:
        """Size over duration, in 10^9 bytes per second."""
        return self.num_bytes / 1e9 / max(sum(self.seconds.values()), 1e-9)

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {one:.1f}" for name, one in self.seconds.items())
        return (
            f"{self.num_bytes / 1e9:.2f} GB in {counted(self.num_files, 'file')}, "
            f"{sum(self.seconds.values()):.1f} s ({phases}), {self.gb_per_s:.2f} GB/s, "
            f"training waited {self.waited_s:.1f} s"
        )


class Clock:
    """Measures the phases of a save or load from its creation on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._waited_s: float | None = None

    def end_phase(self, name: str) -> None:
        """Add the time since the end of the previous phase."""
        elapsed_s = self._elapsed_s() - sum(self._seconds.values())
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s

    def release_training(self) -> None:
        """Record that training continues."""
        self._waited_s = self._elapsed_s()

    def stop(self, num_bytes: int, num_files: int) -> SaveStats:
        """Return the figures of the finished save or load."""
        waited_s = self._elapsed_s() if self._waited_s is None else self._waited_s
        return SaveStats(num_bytes, num_files, self._seconds, waited_s)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started


@contextmanager
def show_progress(is_shown: bool, title: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds bytes to a bar on the terminal, if there is one and tqdm."""
    if is_shown and sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(total=num_bytes, desc=title, unit="B", unit_scale=True, delay=_DELAY_S) as bar:
            yield bar.update
    else:
        yield lambda _: None
