"""A thread that sends metrics, many in one call, and keeps them while the tracker is away."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from mcore.observe.secrets import mask_secrets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step; the time is that of logging, in milliseconds since 1970."""

    metrics: Mapping[str, float]
    step: int
    time_ms: int


@dataclass(eq=False)
class MetricSender:
    """Sends metrics in order, in a thread that the first ones start.

    A call that fails because the tracker is away is repeated until it succeeds, so the tracker must
    accept the same metrics twice. What is logged once the tracker is back is never lost.
    """

    name: str
    send: Callable[[Sequence[StepMetrics]], object]
    _: KW_ONLY
    is_away: Callable[[Exception], bool]
    max_values: int = 100_000  # kept at most; the oldest are dropped first
    max_per_call: int = 1000
    linger_s: float = 1.0  # how long values wait for further ones
    first_retry_s: float = 0.5  # doubled by each further failure in a row
    longest_retry_s: float = 10.0
    patience_s: float = 2.0  # with one call, after which a caller no longer waits for room

    def __post_init__(self) -> None:
        self.num_dropped = 0
        self._changed = threading.Condition()
        self._waiting: collections.deque[StepMetrics] = collections.deque()
        self._num_waiting = 0
        self._in_flight: list[StepMetrics] = []
        self._call_started_s = 0.0
        self._failures_in_a_row = 0
        self._hurry = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def num_kept(self) -> int:
        """Values that have not arrived yet."""
        return self._num_waiting + _count(self._in_flight)

    def put(self, entry: StepMetrics) -> None:
        """Have metrics sent; raise what an earlier call raised, once, and send them anyway."""
        with self._changed:
            self._start()
            for part in _parts(entry, self.max_per_call):
                self._make_room(len(part.metrics))
                self._waiting.append(part)
                self._num_waiting += len(part.metrics)
            if self._num_waiting >= self.max_per_call or len(self._waiting) == 1:
                self._changed.notify_all()
        self._raise_error()

    def flush(self) -> None:
        """Wait until all metrics have arrived or the tracker is found to be away; raise as put."""
        with self._changed:
            failures = self._failures_in_a_row
            while self.num_kept and self._failures_in_a_row <= failures and self._is_running():
                self._hurry = True
                self._changed.notify_all()
                self._changed.wait(1.0)
                failures = min(failures, self._failures_in_a_row)
            self._hurry = False
        self._raise_error()

    def close(self, timeout_s: float = 30.0) -> None:
        """Send what is left and end the thread; a later :meth:`put` starts another one.

        A tracker that is away is waited for; what has not arrived then is given up, with one ERROR.
        """
        thread = self._thread
        if thread is not None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
                deadline_s = time.monotonic() + timeout_s
                while self.num_kept and (self._is_answering() or time.monotonic() < deadline_s):
                    self._changed.wait(0.2)
                self._give_up()
            thread.join(self.patience_s)
            with self._changed:  # a call that hangs still ends with the process
                self._thread = None
                self._in_flight = []
        self._raise_error()

    def _start(self) -> None:
        if not self._is_running():
            self._closing = False
            self._thread = threading.Thread(
                target=self._run, name=f"mcore.observe sender to {self.name}", daemon=True
            )
            self._thread.start()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_answering(self) -> bool:
        """Return whether the last call succeeded and the present one is not overdue."""
        if self._failures_in_a_row:
            return False
        waited_s = time.monotonic() - self._call_started_s
        return not self._in_flight or waited_s < self.patience_s

    def _make_room(self, num_values: int) -> None:
        while self._num_waiting + num_values > self.max_values and self._waiting:
            if self._is_answering():
                self._changed.notify_all()
                self._changed.wait(self.patience_s / 10)
            else:
                oldest = self._waiting.popleft()
                self._num_waiting -= len(oldest.metrics)
                self.num_dropped += len(oldest.metrics)

    def _give_up(self) -> None:
        if self.num_kept:
            entries = [*self._in_flight, *self._waiting]
            logger.error(
                "%s is away: %d values of steps %d to %d did not reach it",
                self.name,
                self.num_kept,
                min(entry.step for entry in entries),
                max(entry.step for entry in entries),
            )
        self._waiting.clear()
        self._num_waiting = 0
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wait_for_work():
                    return
                taken = self._take()
            error = self._attempt(taken)
            with self._changed:
                if threading.current_thread() is not self._thread:
                    return  # given up while the call hung
                self._settle(taken, error)

    def _wait_for_work(self) -> bool:
        """Wait until a call is due, or return False when there will be none."""
        while not self._waiting:
            if self._closing:
                return False
            self._changed.wait()
        started_s = time.monotonic()
        while not self._is_urgent():
            left_s = started_s + self._pause_s() - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._hurry = False
        return bool(self._waiting) or not self._closing

    def _is_urgent(self) -> bool:
        if self._failures_in_a_row:
            return self._hurry or not self._waiting
        return self._hurry or self._closing or self._num_waiting >= self.max_per_call

    def _pause_s(self) -> float:
        if not self._failures_in_a_row:
            return self.linger_s
        longest_s = min(1.0, self.longest_retry_s) if self._closing else self.longest_retry_s
        doublings = min(self._failures_in_a_row - 1, 30)
        return float(min(self.first_retry_s * 2**doublings, longest_s))

    def _take(self) -> tuple[StepMetrics, ...]:
        room = self.max_per_call
        while self._waiting and len(self._waiting[0].metrics) <= room:
            entry = self._waiting.popleft()
            room -= len(entry.metrics)
            self._in_flight.append(entry)
        self._num_waiting -= _count(self._in_flight)
        self._call_started_s = time.monotonic()
        return tuple(self._in_flight)

    def _attempt(self, taken: Sequence[StepMetrics]) -> Exception | None:
        try:
            if taken:
                self.send(taken)
        except Exception as error:
            return error
        return None

    def _settle(self, taken: Sequence[StepMetrics], error: Exception | None) -> None:
        self._in_flight = []
        if error is not None and self.is_away(error):
            self._waiting.extendleft(reversed(taken))
            self._num_waiting += _count(taken)
            self._note_away(error)
        elif taken:
            self._error = self._error or error
            self._note_answer()
        self._changed.notify_all()

    def _note_away(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row == 1:
            logger.warning(
                "%s is away, training continues: the last %d values are kept and sent when it is "
                "back: %s: %s",
                self.name,
                self.max_values,
                type(error).__name__,
                mask_secrets(str(error)),
            )

    def _note_answer(self) -> None:
        if self._failures_in_a_row:
            level = logging.WARNING if self.num_dropped else logging.INFO
            dropped, self.num_dropped = self.num_dropped, 0
            logger.log(level, "%s is back; %d values were lost meanwhile", self.name, dropped)
        self._failures_in_a_row = 0

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _count(entries: Sequence[StepMetrics]) -> int:
    return sum(len(entry.metrics) for entry in entries)


def _parts(entry: StepMetrics, size: int) -> list[StepMetrics]:
    if len(entry.metrics) <= size:
        return [entry] if entry.metrics else []
    items = list(entry.metrics.items())
    return [
        StepMetrics(dict(items[start : start + size]), entry.step, entry.time_ms)
        for start in range(0, len(items), size)
    ]
