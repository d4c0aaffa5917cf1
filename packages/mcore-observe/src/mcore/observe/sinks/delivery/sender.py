"""A thread that sends metrics, many in one call, and keeps them while a tracker is unreachable."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from mcore.observe.sinks.delivery.spool import Spool, StepMetrics
from mcore.observe.sinks.secrets import mask_secrets

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MetricSender:
    """Sends metrics in order, in a thread that starts with the first of them.

    A call that fails because the tracker is unreachable is repeated until it succeeds, so the
    tracker must accept the same metrics twice. If too many wait, the oldest are dropped from
    memory. With a spool they stay on the disk for a replay, as do metrics that have not arrived at
    the end.
    """

    name: str
    send: Callable[[Sequence[StepMetrics]], object]
    _: KW_ONLY
    is_unreachable: Callable[[Exception], bool]
    spool: Spool | None = None
    is_preparing: Callable[[], bool] = lambda: False  # busy with an import, not with the tracker
    max_values: int | None = None  # in memory. None: 2,000,000 with a spool, else 100,000
    max_per_call: int = 1000
    linger_s: float = 1.0  # how long values wait for more values
    first_retry_s: float = 0.5  # doubled by each further failure in a row
    longest_retry_s: float = 10.0
    patience_s: float = 2.0  # with one call, after which the tracker counts as hanging

    def __post_init__(self) -> None:
        self.num_dropped = 0
        self._changed = threading.Condition()
        self._waiting: collections.deque[StepMetrics] = collections.deque()
        self._num_waiting = 0
        self._last_number = 0
        self._in_flight: list[StepMetrics] = []
        self._call_started_s: float | None = None
        self._failures_in_a_row = 0
        self._opening = False  # an empty call is due
        self._hurry = False
        self._closing = False
        self._is_done = True
        self._last_call: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def num_kept(self) -> int:
        """Values that have not arrived yet."""
        with self._changed:
            return self._num_waiting + _count(self._in_flight)

    @property
    def has_thread(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _most_values(self) -> int:
        if self.max_values is not None:
            return self.max_values
        return 100_000 if self.spool is None else 2_000_000

    def start(self) -> None:
        """Start the thread with an empty call, which is repeated like any other."""
        with self._changed:
            self._opening = True
            self._start()
            self._changed.notify_all()

    def put(self, entry: StepMetrics) -> None:
        """Queue metrics. Re-raises, once, an error of an earlier send, after queueing."""
        items = list(entry.metrics.items())
        with self._changed:
            self._start()
            for start in range(0, len(items), self.max_per_call):
                part = entry
                if len(items) > self.max_per_call:
                    part = replace(entry, metrics=dict(items[start : start + self.max_per_call]))
                self._last_number += 1
                self._keep(replace(part, number=self._last_number))
            if self._num_waiting >= self.max_per_call or len(self._waiting) == 1:
                self._changed.notify_all()
        self._raise_error()

    def flush(self) -> None:
        """Wait until all metrics arrive or the tracker is found unreachable. Raises like put."""
        with self._changed:
            failures = self._failures_in_a_row
            while self.num_kept and self._failures_in_a_row <= failures and self.has_thread:
                self._hurry = True
                self._changed.notify_all()
                self._changed.wait(1.0)
                failures = min(failures, self._failures_in_a_row)
            self._hurry = False
        self._raise_error()

    def begin_close(self, last_call: Callable[[], object] | None = None) -> None:
        """Let the thread send the rest, make a last call and end, without waiting for it."""
        with self._changed:
            if not self._closing:
                self._closing = True
                self._last_call = last_call
            self._changed.notify_all()

    def close(self, timeout_s: float = 30.0, *, at_once: bool = False) -> bool:
        """Send the rest, end the thread and return whether everything was done.

        A later :meth:`put` starts another thread. An unreachable tracker has this much time. One
        that responds has more, unless ``at_once`` is set. The remaining metrics are given
        up, with one ERROR.
        """
        self.begin_close()
        thread = self._thread
        is_done = True
        if thread is not None:
            with self._changed:
                deadline_s = time.monotonic() + timeout_s
                while not self._is_done:
                    if self.is_preparing() and not at_once:
                        deadline_s = time.monotonic() + timeout_s
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0 and (at_once or not self._is_progressing()):
                        break
                    self._changed.wait(0.2 if left_s <= 0 else min(left_s, 0.2))
                is_done = self._is_done
                if not is_done:
                    self._give_up()
            thread.join(1.0 if is_done else 0.05)
            with self._changed:  # the thread is a daemon: a hanging call ends with the process
                self._thread = None
                self._in_flight = []
        self._raise_error()
        return is_done

    def _start(self) -> None:
        if not self.has_thread:
            self._closing = False
            self._last_call = None
            self._is_done = False
            self._thread = threading.Thread(
                target=self._run, name=f"mcore.observe sender to {self.name}", daemon=True
            )
            self._thread.start()

    def _is_progressing(self) -> bool:
        """Return whether the last call succeeded and the present one is not overdue."""
        if self.is_preparing():
            return True
        if self._failures_in_a_row:
            return False
        started_s = self._call_started_s
        return started_s is None or time.monotonic() - started_s < self.patience_s

    def _keep(self, part: StepMetrics) -> None:
        count, most = len(part.metrics), self._most_values
        if self.spool is not None:
            self.spool.append(part)
        while self._num_waiting + count > most and self._waiting:
            oldest = self._waiting.popleft()
            self._num_waiting -= len(oldest.metrics)
            self.num_dropped += len(oldest.metrics)
        self._waiting.append(part)
        self._num_waiting += count

    def _give_up(self) -> None:
        if self.num_kept:
            entries = [*self._in_flight, *self._waiting]
            where = ""
            if self.spool is not None and self.spool.leave():
                folder = self.spool.run_folder
                where = f". Send them with: python -m mcore.observe replay {folder}"
            logger.error(
                "%s is unreachable: %d values of steps %d to %d have not arrived%s",
                self.name,
                self.num_kept,
                min((entry.step for entry in entries), default=0),
                max((entry.step for entry in entries), default=0),
                where,
            )
        self._waiting.clear()
        self._num_waiting = 0
        self._opening = False
        self._changed.notify_all()

    def _run(self) -> None:
        """Send until the sender is closed and everything has arrived, then make the last call."""
        while self._wait_for_work():
            with self._changed:
                taken = self._take()
            error: Exception | None = None
            try:
                if taken or self._opening:
                    self.send(taken)
            except Exception as raised:
                error = raised
            with self._changed:
                if threading.current_thread() is not self._thread:
                    return  # given up while the call hung
                self._settle(taken, error)
        with self._changed:
            if threading.current_thread() is not self._thread:
                return
            last_call = None if self._failures_in_a_row else self._last_call
            self._call_started_s = time.monotonic()
        try:
            if last_call is not None:
                last_call()
        except Exception as raised:
            self._error = self._error or raised
        with self._changed:
            self._call_started_s = None
            self._is_done = True
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until a call is due, or return False if no call will be due."""
        while True:
            with self._changed:
                while not (self._waiting or self._opening):
                    if self._closing:
                        return False
                    self._changed.wait()
                self._pause()
                # close() may have given everything up during the pause.
                if self._waiting or self._opening:
                    return True

    def _pause(self) -> None:
        """Wait for more values to send in the same call, or before the next retry."""
        started_s = time.monotonic()
        while not self._is_urgent():
            pause_s = self.linger_s
            if self._failures_in_a_row:
                # The end of a run waits only closing_s: retry at least every second.
                longest_s = (
                    min(1.0, self.longest_retry_s) if self._closing else self.longest_retry_s
                )
                doublings = min(self._failures_in_a_row - 1, 30)
                pause_s = float(min(self.first_retry_s * 2**doublings, longest_s))
            left_s = started_s + pause_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._hurry = False

    def _is_urgent(self) -> bool:
        if self._failures_in_a_row:
            return self._hurry or not (self._waiting or self._opening)
        return (
            self._hurry or self._closing or self._opening or self._num_waiting >= self.max_per_call
        )

    def _take(self) -> tuple[StepMetrics, ...]:
        room = self.max_per_call
        while self._waiting and len(self._waiting[0].metrics) <= room:
            entry = self._waiting.popleft()
            room -= len(entry.metrics)
            self._in_flight.append(entry)
        self._num_waiting -= _count(self._in_flight)
        self._call_started_s = time.monotonic()
        return tuple(self._in_flight)

    def _settle(self, taken: Sequence[StepMetrics], error: Exception | None) -> None:
        self._in_flight = []
        self._call_started_s = None
        if error is not None and self.is_unreachable(error):
            self._waiting.extendleft(reversed(taken))
            self._num_waiting += _count(taken)
            self._failures_in_a_row += 1
            if self._failures_in_a_row == 1:
                kept = "all" if self.spool is not None else f"the last {self._most_values}"
                logger.warning(
                    "%s is unreachable, training continues: %s values are kept and sent when it "
                    "responds: %s: %s",
                    self.name,
                    kept,
                    type(error).__name__,
                    mask_secrets(str(error)),
                )
        else:
            self._error = self._error or error
            self._opening = False
            if self._failures_in_a_row:
                level = logging.WARNING if self.num_dropped else logging.INFO
                dropped, self.num_dropped = self.num_dropped, 0
                fate = "were lost" if self.spool is None else "wait on the disk for a replay"
                logger.log(level, "%s is reachable again, %d values %s", self.name, dropped, fate)
            self._failures_in_a_row = 0
        self._changed.notify_all()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _count(entries: Sequence[StepMetrics]) -> int:
    return sum(len(entry.metrics) for entry in entries)
