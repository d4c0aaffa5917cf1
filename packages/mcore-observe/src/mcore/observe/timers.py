"""Named timers of one job, with levels of detail, gathered over the ranks for reports."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.sinks import sanitize_metric_name
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import all_gather_single, is_distributed
from mcore.tensor.device import capture_query, current_device
from mcore.versioning.process_rank import process_rank, process_world_size

# With this many open pairs of events, the pairs that the device has passed are summed and reused.
_MAX_OPEN_PAIRS = 256


class Timer:
    """A stopwatch that adds up the ranges between ``start`` and ``stop``.

    Args:
        name: Name for messages.
        sync: True waits for the accelerator at both ends of a range and reads the host's clock.
            False records events on the accelerator's current stream and waits when the time is
            read. Without an accelerator both read the host's clock. While a graph is captured,
            True does not wait, and False does not measure the range.
        clock: The clock that measures the ranges. None chooses by ``sync``.

    Example:
        >>> timer = Timer("forward")
        >>> timer.start()
        >>> timer.stop()
        >>> timer.elapsed() > 0
        True
    """

    def __init__(
        self, name: str, *, sync: bool = True, clock: HostClock | DeviceClock | None = None
    ) -> None:
        self.name = name
        if clock is None and (sync or not torch.accelerator.is_available()):
            clock = HostClock(sync=sync)
        elif clock is None:
            clock = DeviceClock(
                lambda: torch.Event(current_device(), enable_timing=True),
                capture_query(current_device()),
            )
        self._clock = clock
        self._running = False
        self._elapsed = 0.0
        self._active = 0.0
        self._barrier_group: dist.ProcessGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether a range is open."""
        return self._running

    def start(self, barrier: bool = False) -> None:
        """Open a range.

        Args:
            barrier: First wait for the other ranks of the barrier group. No effect if
                torch.distributed is not initialised.

        Raises:
            RuntimeError: The timer is already running.

        Example:
            >>> Timer("forward").start()
        """
        if self._running:
            raise RuntimeError(f"timer {self.name!r} is already running: call stop() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.start()
        self._running = True

    def stop(self, barrier: bool = False) -> None:
        """Close the range and add it.

        Args:
            barrier: First wait for the other ranks, as in :meth:`start`.

        Raises:
            RuntimeError: The timer is not running.

        Example:
            >>> Timer("forward").stop()
            Traceback (most recent call last):
            ...
            RuntimeError: timer 'forward' is not running: call start() first
        """
        if not self._running:
            raise RuntimeError(f"timer {self.name!r} is not running: call start() first")
        if barrier:
            self._wait_for_ranks()
        self._clock.stop()
        self._running = False

    def reset(self) -> None:
        """Drop the elapsed time, and the open range if there is one.

        Example:
            >>> timer = Timer("forward")
            >>> timer.start()
            >>> timer.reset()
            >>> timer.elapsed()
            0.0
        """
        self._collect()
        self._elapsed = 0.0
        self._running = False

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return this rank's seconds since the last reset. A running timer continues.

        Args:
            reset: Start again from zero.
            barrier: A running timer first waits for the other ranks, as in :meth:`start`.

        Example:
            >>> Timer("forward").elapsed()
            0.0
        """
        was_running = self._running
        if was_running:
            self.stop(barrier=barrier)
        self._collect()
        seconds = self._elapsed
        if reset:
            self._elapsed = 0.0
        if was_running:
            self.start()
        return seconds

    def active_time(self) -> float:
        """Return this rank's seconds of all ranges since the timer was made, despite resets.

        Example:
            >>> Timer("forward").active_time()
            0.0
        """
        self._collect()
        return self._active

    def set_elapsed(self, value: float) -> None:
        """Set the elapsed time, in seconds.

        Example:
            >>> timer = Timer("forward")
            >>> timer.set_elapsed(2.5)
            >>> timer.elapsed()
            2.5
        """
        self._collect()
        self._elapsed = float(value)

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Choose the ranks that ``barrier=True`` waits for. The default None is the world group.

        Example:
            >>> Timer("forward").set_barrier_group(None)
        """
        self._barrier_group = barrier_group

    def _collect(self) -> None:
        seconds = self._clock.take()
        self._elapsed += seconds
        self._active += seconds

    def _wait_for_ranks(self) -> None:
        if is_distributed():
            dist.barrier(group=self._barrier_group)


class DisabledTimer:
    """A timer above the measured level. Starting and stopping it does nothing."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def set_elapsed(self, value: float) -> None:
        """Do nothing."""

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Do nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Raise RuntimeError: nothing was measured."""
        raise RuntimeError(
            "this timer is disabled because its level is above that of its Timers: raise their "
            "log_level to measure it"
        )

    def active_time(self) -> float:
        """Raise RuntimeError: nothing was measured."""
        return self.elapsed()


class HostClock:
    """The host's clock. With ``sync`` it waits for the accelerator at both ends of a range."""

    def __init__(self, *, sync: bool) -> None:
        self._sync = sync and torch.accelerator.is_available()
        self._is_capturing = capture_query(current_device())
        self._began = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range."""
        self._began = self._read_clock()

    def stop(self) -> None:
        """Close the range."""
        self._seconds += self._read_clock() - self._began

    def take(self) -> float:
        """Return the seconds of the ranges closed since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _read_clock(self) -> float:
        if self._sync and not self._is_capturing():
            torch.accelerator.synchronize()
        return time.perf_counter()


class DeviceClock:
    """Pairs of events on the current stream. Only reading waits for the device.

    A graph cannot be captured with events that measure time: such ranges are dropped.
    """

    def __init__(self, make_event: Any, is_capturing: Callable[[], bool] = lambda: False) -> None:
        self._make_event = make_event
        self._is_capturing = is_capturing
        self._free: list[Any] = []
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def start(self) -> None:
        """Open a range: record an event."""
        self._begin = None if self._is_capturing() else self._record_event()

    def stop(self) -> None:
        """Close the range: record an event, without waiting for it."""
        if self._begin is None or self._is_capturing():
            return
        self._pairs.append((self._begin, self._record_event()))
        if len(self._pairs) >= _MAX_OPEN_PAIRS:
            self._fold([pair for pair in self._pairs if all(event.query() for event in pair)])

    def take(self) -> float:
        """Wait for the ranges closed since the last call and return their seconds."""
        # Both events of each range: they may be on several streams. The last usually ends last.
        for event in chain.from_iterable(map(reversed, reversed(self._pairs))):
            if not event.query():
                event.synchronize()
        self._fold(self._pairs)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record_event(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _fold(self, finished: list[tuple[Any, Any]]) -> None:
        for begin, end in finished:
            self._seconds += begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        done = {id(end) for _, end in finished}
        self._pairs = [pair for pair in self._pairs if id(pair[1]) not in done]


__all__ = ["Timer", "Timers", "gather_seconds"]

logger = logging.getLogger(__name__)

_FINEST_LEVEL = 2
_NAME_WIDTH = 48
_DISABLED = DisabledTimer()


def gather_seconds(seconds: Sequence[float]) -> torch.Tensor:
    """Gather the times of every rank: ``[world_size, len(seconds)]`` float32 on the group's device.

    One all-gather over the world group, which all ranks enter. No communication without
    torch.distributed or without times.
    """
    mine = torch.tensor([list(seconds)], dtype=torch.float32)
    if not is_distributed() or not seconds:
        return mine
    mine = mine.to(comm_device(dist.group.WORLD))
    rows = mine.new_empty((process_world_size(), len(seconds)))
    all_gather_single(rows, mine, dist.group.WORLD)
    return rows


class Timers:
    """The timers of a job, by name: ``timers("forward").start()``.

    Args:
        log_level: 0, 1 or 2. Timers of a finer (higher) level do nothing. -1 disables all.
        log_option: The ranks that :meth:`log` shows: ``"max"``, ``"minmax"`` or ``"all"``.

    Raises:
        ValueError: Unknown option.

    Example:
        >>> timers = Timers(log_level=1, log_option="max")
        >>> timers("forward", log_level=1).set_elapsed(0.002)
        >>> print(timers.get_all_timers_string())
        max time across ranks (ms):
            forward ........................................: 2.00
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_option not in OPTIONS:
            raise ValueError(f"log_option is {log_option!r}: give one of {list(OPTIONS)}")
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer | DisabledTimer:
        """Return the timer of that name, made at the first call.

        Timers of level 0 and 1 wait for the accelerator at both ends of a range. Timers of level 2
        record events.

        Args:
            name: The name.
            log_level: Its level, 0 to 2. None accepts any level of an existing timer and means
                level 2 for a new one.

        Returns:
            The timer, or for a level above that of the object a shared timer that does nothing.

        Raises:
            ValueError: The level is above 2, or differs from that of the first call.

        Example:
            >>> Timers(0, "max")("forward", log_level=1).start()
        """
        if name in self._timers:
            if log_level is not None and log_level != self._levels[name]:
                raise ValueError(
                    f"timer {name!r} was made with level {self._levels[name]}, not {log_level}: "
                    "leave the level out to get the existing timer"
                )
            return self._timers[name]
        level = _FINEST_LEVEL if log_level is None else log_level
        if level > _FINEST_LEVEL:
            raise ValueError(f"timer {name!r} has level {level}: give 0, 1 or {_FINEST_LEVEL}")
        if level > self._log_level:
            return _DISABLED
        self._timers[name] = Timer(name, sync=level < _FINEST_LEVEL)
        self._levels[name] = level
        return self._timers[name]

    def find(self, name: str) -> Timer | None:
        """Return the timer of that name if it exists and measures, else None.

        Example:
            >>> Timers(0, "max").find("forward") is None
            True
        """
        return self._timers.get(name)

    def local_seconds(self, names: Sequence[str], *, reset: bool) -> list[float]:
        """Return this rank's seconds since the last reset for each name, 0 if it has no timer.

        Example:
            >>> Timers(0, "max").local_seconds(["forward"], reset=False)
            [0.0]
        """
        found = [self._timers.get(name) for name in names]
        return [0.0 if timer is None else timer.elapsed(reset=reset) for timer in found]

    def get_all_timers_string(
        self,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """Format the times of all ranks.

        One all-gather over the world group, none if ``names`` is empty. All ranks call it and get
        the text.

        Args:
            names: Names of the timers, the same on every rank. None means all timers of this rank.
            normalizer: Divides the times.
            reset: Restart the timers from zero.
            barrier: First wait for the other ranks.

        Returns:
            The text, or None if no rank timed anything.

        Raises:
            ValueError: ``normalizer`` is not above 0.

        Example:
            >>> Timers(0, "max").get_all_timers_string(["forward"]) is None
            True
        """
        chosen = list(self._timers) if names is None else list(names)
        rows = self._gather(chosen, normalizer, reset, barrier)
        return self.format(chosen, rows.tolist(), normalizer)

    def format(
        self, names: Sequence[str], rows: Sequence[Sequence[float]], normalizer: float = 1.0
    ) -> str | None:
        """Format ``rows[rank][i]`` seconds for ``names[i]`` in ms, by the option of this object.

        0 means not timed. Returns None if no rank timed anything.

        Example:
            >>> print(Timers(0, "minmax").format(["forward"], [[0.001], [0.002]]))
            (min, max) time across ranks (ms):
                forward ........................................: (1.00, 2.00)
        """
        header, format_timer = OPTIONS[self._log_option]
        scale = 1e3 / normalizer
        lines = [
            format_timer(name, timed)
            for i, name in enumerate(names)
            if (timed := {rank: row[i] * scale for rank, row in enumerate(rows) if row[i] > 0})
        ]
        return header + "".join(lines) if lines else None

    def log(
        self,
        names: Sequence[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Log the times of all ranks at INFO on one rank. Logs nothing if no timer ran.

        One all-gather over the world group, none if ``names`` is empty. All ranks call it.

        Args:
            names: Names of the timers, the same on every rank.
            rank: The rank that logs. None means the last rank.
            normalizer: Divides the times, usually the number of iterations.
            reset: Restart the timers from zero.
            barrier: First wait for the other ranks.

        Raises:
            ValueError: ``normalizer`` is not above 0.

        Example:
            >>> Timers(0, "max").log(["forward"])
        """
        rows = self._gather(names, normalizer, reset, barrier)
        if process_rank() == (process_world_size() - 1 if rank is None else rank):
            self.log_text(self.format(names, rows.tolist(), normalizer))

    def log_text(self, text: str | None) -> None:
        """Log a text of :meth:`format` at INFO. Logs nothing for None."""
        if text is not None:
            logger.info(text)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write ``{name}-time``, the longest time over the ranks in seconds, to TensorBoard.

        One all-gather over the world group, none if ``names`` is empty. All ranks call it.

        Args:
            names: Names of the timers, the same on every rank.
            writer: An object with ``add_scalar``, or None on ranks that do not write.
            iteration: The step.
            normalizer: Divides the times, usually the number of iterations.
            reset: Restart the timers from zero.
            barrier: First wait for the other ranks.

        Raises:
            ValueError: ``normalizer`` is not above 0.

        Example:
            >>> Timers(0, "max").write(["forward"], None, 1)
        """
        longest = self._gather_longest(names, writer, normalizer, reset, barrier)
        for name, seconds in longest.items():
            writer.add_scalar(name, seconds, iteration)

    def write_to_wandb(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the times of :meth:`write` with one ``writer.log(dict, iteration)``."""
        longest = self._gather_longest(names, writer, normalizer, reset, barrier)
        if longest:
            writer.log(longest, iteration)

    def write_to_mlflow(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the times of :meth:`write` with one ``writer.log_metrics(dict, step=...)``."""
        longest = self._gather_longest(names, writer, normalizer, reset, barrier)
        if longest:
            named = {sanitize_metric_name(name): value for name, value in longest.items()}
            writer.log_metrics(named, step=iteration)

    def write_to_comet(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the times of :meth:`write` with one ``writer.log_metrics(dict, step=...)``."""
        longest = self._gather_longest(names, writer, normalizer, reset, barrier)
        if longest:
            writer.log_metrics(longest, step=iteration)

    def _gather_longest(
        self, names: Sequence[str], writer: Any, normalizer: float, reset: bool, barrier: bool
    ) -> dict[str, float]:
        rows = self._gather(names, normalizer, reset, barrier)
        return {} if writer is None else longest_times(names, rows.tolist(), normalizer)

    def _gather(
        self, names: Sequence[str], normalizer: float, reset: bool, barrier: bool
    ) -> torch.Tensor:
        if not normalizer > 0:
            raise ValueError(f"normalizer is {normalizer}; give a number above 0")
        if barrier and is_distributed():
            dist.barrier()
        return gather_seconds(self.local_seconds(names, reset=reset))


def longest_times(
    names: Sequence[str], rows: Sequence[Sequence[float]], normalizer: float = 1.0
) -> dict[str, float]:
    """Return ``{"<name>-time": seconds}``, the longest over the ranks, of timers that ran."""
    longest = {name: max(row[i] for row in rows) for i, name in enumerate(names)}
    return {f"{name}-time": seconds / normalizer for name, seconds in longest.items() if seconds}


def _format_ends(name: str, timed: dict[int, float], *, has_least: bool = True) -> str:
    least, most = f"{min(timed.values()):.2f}", f"{max(timed.values()):.2f}"
    return f"\n    {f'{name} '.ljust(_NAME_WIDTH, '.')}: " + (
        f"({least}, {most})" if has_least else most
    )


def _format_all(name: str, timed: dict[int, float]) -> str:
    ranks = "".join(f"\n     rank {rank:2d}: {ms:.2f}" for rank, ms in timed.items())
    return f"\n  {name}:{ranks}"


OPTIONS: dict[str, tuple[str, Callable[[str, dict[int, float]], str]]] = {
    "max": ("max time across ranks (ms):", functools.partial(_format_ends, has_least=False)),
    "minmax": ("(min, max) time across ranks (ms):", _format_ends),
    "all": ("times across ranks (ms):", _format_all),
}
