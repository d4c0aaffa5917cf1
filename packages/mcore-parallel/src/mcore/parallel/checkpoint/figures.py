"""The progress of saves and loads: figures, a bar, and saves that run in threads."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch.distributed as dist

from mcore.parallel.checkpoint.files.places import Place
from mcore.parallel.checkpoint.team import Team, name_lost_ranks
from mcore.parallel.groups import group_ranks
from mcore.parallel.shortened import counted
from mcore.parallel.torch_compat import group_timeout

logger = logging.getLogger(__name__)
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
        self._started = self._phase_started = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._waited_s: float | None = None

    def end_phase(self, name: str) -> None:
        """Add the time since the end of the previous phase."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._phase_started
        self._phase_started = now

    def release_training(self) -> None:
        """Record that training continues."""
        self._waited_s = time.perf_counter() - self._started

    def stop(self, num_bytes: int, num_files: int) -> SaveStats:
        """Return the figures of the finished save or load."""
        if self._waited_s is None:
            self.release_training()
        return SaveStats(num_bytes, num_files, self._seconds, self._waited_s or 0.0)


@contextmanager
def show_progress(
    title: str, num_bytes: int, stream: TextIO | None, delay_s: float | None = None
) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds bytes to a bar on a stream, if that is a terminal."""
    bar = None
    if stream is not None and stream.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            logger.warning("no progress bar is shown: pip install 'mcore-parallel[progress]'")
        else:
            options: dict[str, Any] = {
                "unit": "B",
                "unit_scale": True,
                "delay": _DELAY_S if delay_s is None else delay_s,
                "file": stream,
            }
            bar = tqdm(total=num_bytes, desc=title, **options)
    if bar is None:
        yield deque[int](maxlen=0).append  # drops the numbers
    else:
        with bar:
            yield bar.update


class SaveHandle:
    """An asynchronous save.

    Args:
        path: The path of the checkpoint.
        future: Done when the save has finished or failed.

    Attributes:
        path: The path of the checkpoint.
        stats: The figures of the save, None until it has finished. ``waited_s`` includes the time
            in :meth:`result`.

    Example:
        >>> import tempfile, torch
        >>> from mcore.parallel.checkpoint import ShardedTensor, save_sharded_state_dict
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> folder = tempfile.mkdtemp()
        >>> handle = save_sharded_state_dict({"w": shard}, folder + "/step_1", async_=True)
        >>> handle.result().name
        'step_1'
        >>> handle.done()
        True
    """

    def __init__(self, path: Place, future: concurrent.futures.Future[SaveStats]) -> None:
        self.path = path
        self._future = future
        self._waited_s = 0.0

    @property
    def stats(self) -> SaveStats | None:
        if not self._future.done() or self._future.exception() is not None:
            return None
        stats = self._future.result()
        return stats._replace(waited_s=stats.waited_s + self._waited_s)

    def done(self) -> bool:
        """Return whether the save has finished or failed on this rank."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Place:
        """Wait until the checkpoint is complete under its name.

        Args:
            timeout: Longest wait in seconds. None waits without a limit.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointingException: The save failed. All ranks raise it.
            TimeoutError: The save is not finished yet. It continues.
        """
        started = time.perf_counter()
        try:
            self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            raise TimeoutError(
                f"the save to {self.path} is not finished after {timeout} s"
            ) from error
        finally:
            self._waited_s += time.perf_counter() - started
        return self.path

    def wait(self, timeout: float | None = None) -> None:
        """Do the same as :meth:`result`, but return nothing."""
        self.result(timeout)


@dataclass
class _SaveQueue:
    """The asynchronous saves of one set of ranks, which run in the order of the calls.

    They use a separate group, because other threads keep using the caller's group.
    """

    world: dist.ProcessGroup | None
    team: Team
    last: concurrent.futures.Future[SaveStats] | None = None


_lock = threading.Lock()
_queues: dict[tuple[int, ...], _SaveQueue] = {}


def _find_queue(team: Team) -> _SaveQueue:
    """Return the queue of a team. The first call makes its group, collectively over the team."""
    world = None if team.group is None else dist.group.WORLD
    ranks = () if team.group is None else tuple(group_ranks(team.group))
    with _lock:
        # torch.distributed was initialised anew: the groups of the old world are gone.
        for old in [key for key, queue in _queues.items() if queue.world is not world]:
            del _queues[old]
        queue = _queues.get(ranks)
    if queue is not None:
        return queue
    if team.group is not None:
        with name_lost_ranks():
            group = dist.new_group(
                list(ranks),
                timeout=group_timeout(team.group),
                backend="gloo",
                # Only the ranks of the team call this, unless they are the world.
                use_local_synchronization=len(ranks) != dist.get_world_size(),
            )
        team = Team(group, team.rank, team.size)
    queue = _SaveQueue(world, team)
    with _lock:
        _queues[ranks] = queue
    return queue


def start_async_save(
    path: Place, team: Team, save: Callable[[Team], SaveStats], clock: Clock
) -> SaveHandle:
    """Run a save in a thread, after earlier saves of the same ranks, in a team with its own group.

    Collective over the team: the first call makes a gloo group. The interpreter waits for the save.
    """
    queue = _find_queue(team)
    before, future = queue.last, concurrent.futures.Future[SaveStats]()
    queue.last = future

    def work() -> None:
        if before is not None:
            concurrent.futures.wait([before])
        try:
            future.set_result(save(queue.team))
        except BaseException as error:
            logger.error("the asynchronous save to %s failed: %s", path, error)
            future.set_exception(error)

    clock.release_training()
    threading.Thread(target=work, name=f"save-{path.name}").start()
    return SaveHandle(path, future)
