"""A run of a tracker. One thread opens it, sends its metrics and ends it while training continues.

Metrics that wait are in memory, and with a spool in a file too. Only this thread calls the tracker.
"""

from __future__ import annotations

import abc
import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mcore.observe.sinks.delivery.process_end import exit_code_of, on_process_end
from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool, SpoolOwner, StepMetrics
from mcore.observe.sinks.scalars import as_number, plain_numbers
from mcore.observe.sinks.secrets import mask_secrets

logger = logging.getLogger(__name__)

_PREPARING_S = 120.0  # the longest import of a library that an orderly end waits for
_ENTRIES_PER_CALL = 20
_Client = TypeVar("_Client")


@dataclass(frozen=True)
class Opening:
    """The arguments that open a run of a tracker."""

    settings: Any  # of the logger
    config: Any = None  # the whole configuration, which the tracker may show as texts
    run_id: str | None = None  # of a run to continue
    resume_step: int | None = None  # the last valid step of that run
    spool: Spool | None = None
    earlier: EarlierSpools | None = None
    on_open: Callable[[str], None] | None = None

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments that every :class:`TrackerRun` has in common."""
        closing_s = as_number(getattr(self.settings, "closing_s", None))
        return {
            "spool": self.spool,
            "closing_s": 10.0 if closing_s is None else float(closing_s),
            "earlier": self.earlier,
            "on_open": self.on_open,
        }


class TrackerRun(abc.ABC, Generic[_Client]):
    """One run of a tracker, which accepts metrics before it is open.

    A thread sends the metrics in order, many in one call. It starts with the first of them. A call
    that fails because the tracker is unreachable is one WARNING and is repeated until it succeeds,
    so the tracker must accept the same metrics twice. If too many wait, the oldest are dropped from
    memory. With a spool they stay on the disk for a replay, as do metrics that have not arrived at
    the end. A missing library or wrong settings are errors. The end of the process ends the run,
    unless it has ended before.

    Args:
        connect: Opens the run: called when it is first needed, and after each failure.
        name: The tracker's name in messages. None is that of the class.
        spool: Keeps metrics on the disk until they arrive.
        closing_s: Seconds that :meth:`close` waits for an unreachable tracker.
        earlier: Metrics that earlier starts of the run could not send. They are sent first.
        on_open: Called with the run's id once it is open.
    """

    _label = "tracker"  # the usual name in messages
    max_per_call = 1000  # values
    linger_s = 1.0  # how long values wait for more values
    first_retry_s = 0.5  # doubled by each further failure in a row
    longest_retry_s = 10.0
    patience_s = 2.0  # with one call, after which the tracker counts as hanging

    def __init__(
        self,
        connect: Callable[[], _Client],
        *,
        name: str | None = None,
        spool: Spool | None = None,
        closing_s: float = 10.0,
        earlier: EarlierSpools | None = None,
        on_open: Callable[[str], None] | None = None,
    ) -> None:
        self.status, self.exit_code = "FINISHED", 0
        self.closing_s = closing_s
        self.max_values = 100_000 if spool is None else 2_000_000  # in memory
        self.num_logged = self.num_dropped = 0
        self._num_arrived = 0
        self._name = name or self._label
        self._given_names: dict[str, str] = {}  # by the name that the tracker accepts
        self._connect = connect
        self._connection: _Client | None = None
        self._connecting = threading.Lock()
        self._preparing_until_s = 0.0
        self._spool = spool
        self._earlier = earlier
        self._on_open = on_open
        # The thread, and its queue under the condition.
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting: collections.deque[StepMetrics] = collections.deque()
        self._num_waiting = 0
        self._last_number = 0
        self._in_flight: tuple[StepMetrics, ...] = ()
        self._call_started_s: float | None = None
        self._failures_in_a_row = 0
        self._is_opening = False  # the run is to be opened, even without metrics
        self._hurry = False
        self._closing = False  # the thread ends once everything has arrived
        self._ends_run = False  # and ends the run before that
        self._is_done = False
        self._error: Exception | None = None
        self._ended = False
        self._has_finished = False
        self._ending = threading.Lock()
        _RUNS.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self._connection is not None

    @property
    def run_id(self) -> str:
        """The run's name in the tracker, empty until it is open."""
        return "" if self._connection is None else self._get_run_id(self._connection)

    @property
    def num_missing(self) -> int:
        """Values that were logged and have not arrived in the tracker."""
        return self.num_logged - self._num_arrived

    @property
    def num_kept(self) -> int:
        """Values in memory that have not arrived yet."""
        with self._changed:
            return self._num_waiting + _count(self._in_flight)

    def open(self) -> _Client:
        """Open the run unless it is open.

        Returns:
            The result of :attr:`connect`.

        Raises:
            Exception: Any error of :attr:`connect`.
        """
        with self._connecting:
            if self._connection is None:
                connection = self._connect()
                # The library may have registered functions for the end of the process by now.
                _RUNS.come_first()
                run_id = self._get_run_id(connection)
                if self._spool is not None:
                    self._spool.note({"run_id": run_id})
                if self._on_open is not None:
                    self._on_open(run_id)
                if self._earlier is not None:
                    for owner in self._earlier.of_run(run_id):
                        self._send_left(connection, owner, self._earlier.up_to)
                self._connection = connection
            return self._connection

    def get_client(self) -> Any:
        """Return the live object of the tracker's library, waiting until the run is open."""
        return self.open()

    def open_in_background(self) -> None:
        """Start to open the run, without waiting for an import or a server."""
        with self._changed:
            self._is_opening = True
            self._start_thread()
            self._changed.notify_all()

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, *, time_s: float | None = None
    ) -> None:
        """Send metrics of one step in the background.

        Args:
            metrics: Numbers by name. None is dropped, NaN is kept.
            step: The step. None is 0.
            time_s: When they were measured, in seconds of ``time.time()``. None is now.

        Raises:
            RuntimeError: The run was closed.
            Exception: An error of the tracker for metrics sent earlier.
        """
        if self._ended:
            raise RuntimeError(f"the {self._name} run {self.run_id} was closed: open another one")
        numbers = list(plain_numbers(self._rename(metrics)).items())
        self.num_logged += len(numbers)
        time_ms = int((time.time() if time_s is None else time_s) * 1000)
        with self._changed:
            self._start_thread()
            for first in range(0, len(numbers), self.max_per_call):
                part = dict(numbers[first : first + self.max_per_call])
                self._last_number += 1
                entry = StepMetrics(part, int(step or 0), time_ms, self._last_number)
                if self._spool is not None:
                    self._spool.append(entry)
                while self._num_waiting + len(part) > self.max_values and self._waiting:
                    num_oldest = len(self._waiting.popleft().metrics)
                    self._num_waiting -= num_oldest
                    self.num_dropped += num_oldest
                self._waiting.append(entry)
                self._num_waiting += len(part)
            if self._num_waiting >= self.max_per_call or len(self._waiting) == 1:
                self._changed.notify_all()
        self._raise_error()

    def flush(self) -> None:
        """Wait until all metrics have arrived, or until the tracker is found unreachable.

        It does not wait for the run to be opened.

        Raises:
            Exception: The first error of a batch, after waiting for all.
        """
        if not self.is_open:
            return
        with self._changed:
            failures = self._failures_in_a_row
            while self.num_kept and self._failures_in_a_row <= failures and self._has_thread:
                self._hurry = True
                self._changed.notify_all()
                self._changed.wait(1.0)
                failures = min(failures, self._failures_in_a_row)
            self._hurry = False
        self._raise_error()

    def release(self) -> None:
        """Flush and release the run without ending it. Another object may continue it."""
        self._end(None, ends_run=False)

    def begin_close(self, status: str | None = None, *, ends_run: bool = True) -> None:
        """Start to end the run in the background. :meth:`close` then waits for the end."""
        with self._changed:
            if self._has_thread and not self._closing:
                self.status = status or self.status
                self.exit_code = exit_code_of(self.status)
                self._closing, self._ends_run = True, ends_run
            self._changed.notify_all()

    def close(self, status: str | None = None, *, deadline_s: float | None = None) -> None:
        """Flush and end the run. Closing twice is fine, and the first status stays.

        It waits at most :attr:`closing_s` for an unreachable tracker or for a run that is being
        opened. Imports, and a tracker that responds, may take longer, unless the status is
        ``"KILLED"``.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``. None is :attr:`status`.
            deadline_s: The end of the wait by ``time.monotonic()``, instead of ``closing_s``.

        Raises:
            Exception: A batch was refused, or the run could not be opened. The run is still ended.
        """
        with self._ending:
            if self._ended:
                return
            self.status = status or self.status
            self.exit_code = exit_code_of(self.status)
            if self._spool is not None and self.num_logged:
                self._spool.note({"status": self.status})
            self._end(deadline_s, ends_run=True)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark the run as busy with work of this process, such as an import."""
        self._preparing_until_s = time.monotonic() + _PREPARING_S
        try:
            yield
        finally:
            self._preparing_until_s = 0.0

    def send_left(self, owner: SpoolOwner) -> int:
        """Send the metrics that a dead process left in a spool file, and remove the file.

        Returns:
            Values sent.
        """
        return self._send_left(self.open(), owner, None)

    def _send_left(self, connection: _Client, owner: SpoolOwner, up_to: int | None) -> int:
        left = owner.contents.entries.values()
        entries = [entry for entry in left if up_to is None or entry.step <= up_to]
        missing = self._drop_known(connection, entries)
        for start in range(0, len(missing), _ENTRIES_PER_CALL):
            part = missing[start : start + _ENTRIES_PER_CALL]
            self._write(connection, part)
            # After each part: if this process dies too, the next replay sends only the rest.
            owner.settle(part)
        owner.remove()
        return _count(missing)

    def _rename(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metrics under names that the tracker accepts."""
        return metrics

    def _drop_known(
        self, connection: _Client, entries: Sequence[StepMetrics]
    ) -> Sequence[StepMetrics]:
        """Drop metrics that arrived in the tracker before an earlier process died."""
        return entries

    def _is_unreachable(self, error: Exception) -> bool:
        """Return whether the same call may succeed later."""
        return isinstance(error, OSError)

    def _get_run_id(self, connection: _Client) -> str:
        """Return the run's name in the tracker."""
        return ""

    @abc.abstractmethod
    def _write(self, connection: _Client, entries: Sequence[StepMetrics]) -> None:
        """Write entries to the tracker, waiting for it."""

    @abc.abstractmethod
    def _end_run(self, connection: _Client, status: str) -> None:
        """End the run, waiting for it."""

    @property
    def _has_thread(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_thread(self) -> None:
        if not self._has_thread:
            self._thread = threading.Thread(
                target=self._run, name=f"mcore.observe sender to {self._name}", daemon=True
            )
            self._thread.start()

    def _end(self, deadline_s: float | None, *, ends_run: bool) -> None:
        """Flush, end the thread, and leave to a replay the metrics that have not arrived."""
        if deadline_s is None:
            deadline_s = time.monotonic() + self.closing_s
        self._ended = True
        _RUNS.remove(self)
        try:
            if self._has_thread:
                self.begin_close(ends_run=ends_run)
                is_done = self._wait_for_thread(deadline_s, at_once=self.status == "KILLED")
                self._has_finished |= is_done and not ends_run
                self._raise_error()
            elif ends_run:
                self._finish()
            else:
                self._has_finished = True
        finally:
            if self._spool is not None and self._has_finished and not self._spool.num_left:
                self._spool.remove()
            elif self._spool is not None:
                self._spool.leave()

    def _wait_for_thread(self, deadline_s: float, *, at_once: bool) -> bool:
        """Wait until the thread has done everything, and return whether it has.

        An unreachable tracker has until the deadline. A tracker that responds has more, unless
        ``at_once`` is set. The remaining metrics are given up, with one ERROR.
        """
        closing_s = max(0.0, deadline_s - time.monotonic())
        with self._changed:
            while not self._is_done:
                now_s = time.monotonic()
                is_preparing = now_s < self._preparing_until_s
                if is_preparing and not at_once:
                    deadline_s = now_s + closing_s
                if now_s >= deadline_s:
                    call_s = 0.0 if self._call_started_s is None else now_s - self._call_started_s
                    responds = not self._failures_in_a_row and call_s < self.patience_s
                    if at_once or not (is_preparing or responds):
                        self._give_up()
                        break
                self._changed.wait(min(0.2, deadline_s - now_s) if now_s < deadline_s else 0.2)
            thread, self._thread = self._thread, None
            self._in_flight = ()
            is_done = self._is_done
        if thread is not None:  # a daemon: a hanging call ends with the process
            thread.join(1.0 if is_done else 0.05)
        return is_done

    def _give_up(self) -> None:
        entries = [*self._in_flight, *self._waiting]
        if entries:
            where = ""
            if self._spool is not None and self._spool.leave():
                folder = self._spool.run_folder
                where = f". Send them with: python -m mcore.observe replay {folder}"
            logger.error(
                "%s is unreachable: %d values of steps %d to %d have not arrived%s",
                self._name,
                _count(entries),
                min(entry.step for entry in entries),
                max(entry.step for entry in entries),
                where,
            )
        self._waiting.clear()
        self._num_waiting = 0
        self._is_opening = False
        self._changed.notify_all()

    def _run(self) -> None:
        """Send until the run is closed and everything has arrived, then end it. The thread."""
        while (entries := self._wait_for_entries()) is not None:
            error: Exception | None = None
            try:
                self._send(entries)
            except Exception as raised:
                error = raised
            with self._changed:
                if threading.current_thread() is not self._thread:
                    return  # given up while the call hung
                self._end_call(entries, error)
        with self._changed:
            if threading.current_thread() is not self._thread:
                return
            ends_run = self._ends_run and not self._failures_in_a_row
            self._call_started_s = time.monotonic()
        try:
            if ends_run:
                self._finish()
        except Exception as raised:
            self._error = self._error or raised
        with self._changed:
            self._call_started_s = None
            self._is_done = True
            self._changed.notify_all()

    def _wait_for_entries(self) -> tuple[StepMetrics, ...] | None:
        """Wait for the next call, and return its entries. None if no call will be due."""
        with self._changed:
            while True:
                while not (self._waiting or self._is_opening):
                    if self._closing:
                        return None
                    self._changed.wait()
                self._pause()
                # The end may have given everything up during the pause.
                if self._waiting or self._is_opening:
                    break
            room = self.max_per_call
            while self._waiting and len(self._waiting[0].metrics) <= room:
                entry = self._waiting.popleft()
                room -= len(entry.metrics)
                self._in_flight += (entry,)
            self._num_waiting -= _count(self._in_flight)
            self._call_started_s = time.monotonic()
            return self._in_flight

    def _pause(self) -> None:
        """Wait for more values to send in the same call, or before the next retry."""
        started_s = time.monotonic()
        while not self._hurry:
            pause_s = self.linger_s
            if not self._failures_in_a_row:
                if self._closing or self._is_opening or self._num_waiting >= self.max_per_call:
                    break
            elif not (self._waiting or self._is_opening):
                break
            else:
                # The end of a run waits only closing_s: retry at least every second.
                longest_s = min(1.0 if self._closing else math.inf, self.longest_retry_s)
                doublings = min(self._failures_in_a_row - 1, 30)
                pause_s = min(self.first_retry_s * float(2**doublings), longest_s)
            left_s = started_s + pause_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        self._hurry = False

    def _send(self, entries: Sequence[StepMetrics]) -> None:
        connection = self.open()
        try:
            if entries:
                self._write(connection, entries)
        except Exception as error:
            # Refused for good: a replay must not send them either.
            if not self._is_unreachable(error):
                self._settle(entries)
            raise
        self._num_arrived += _count(entries)
        self._settle(entries)

    def _settle(self, entries: Iterable[StepMetrics]) -> None:
        if self._spool is not None:
            self._spool.settle(entries)

    def _end_call(self, entries: Sequence[StepMetrics], error: Exception | None) -> None:
        """Note the result of a call. The caller holds the condition."""
        self._in_flight = ()
        self._call_started_s = None
        if error is None:
            is_unreachable = False
        elif self.is_open:
            is_unreachable = self._is_unreachable(error)
        else:  # a missing library or a wrong setting stays so
            is_unreachable = not isinstance(error, (ImportError, ValueError))
        if is_unreachable:
            self._waiting.extendleft(reversed(entries))
            self._num_waiting += _count(entries)
            self._failures_in_a_row += 1
            if self._failures_in_a_row == 1:
                kept = "all" if self._spool is not None else f"the last {self.max_values}"
                logger.warning(
                    "%s is unreachable, training continues: %s values are kept and sent when it "
                    "responds: %s: %s",
                    self._name,
                    kept,
                    type(error).__name__,
                    mask_secrets(str(error)),
                )
        else:
            self._error = self._error or error
            self._is_opening = False
            if self._failures_in_a_row:
                level = logging.WARNING if self.num_dropped else logging.INFO
                dropped, self.num_dropped = self.num_dropped, 0
                fate = "were lost" if self._spool is None else "wait on the disk for a replay"
                logger.log(level, "%s is reachable again, %d values %s", self._name, dropped, fate)
            self._failures_in_a_row = 0
        self._changed.notify_all()

    def _raise_error(self) -> None:
        """Raise, once, the error of an earlier call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        if self._connection is None:
            return
        try:
            self._end_run(self._connection, self.status)
        except Exception as error:
            if not self._is_unreachable(error):
                raise
            logger.error(
                "%s is unreachable and shows the run %s as running: %s",
                self._name,
                self.run_id,
                mask_secrets(str(error)),
            )
        else:
            self._has_finished = True


def _count(entries: Iterable[StepMetrics]) -> int:
    return sum(len(entry.metrics) for entry in entries)


class ClientRun(TrackerRun[_Client]):
    """A run that also has the attributes of the tracker's client. Reading them waits for it.

    Methods of this class and its subclasses, which log, do not wait.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.get_client(), name)


def close_together(runs: Sequence[TrackerRun[Any]], status: str | None = None) -> None:
    """Close runs at the same time: it takes as long as the slowest. Errors are warnings."""
    for run in runs:
        run.begin_close(status)
    started_s = time.monotonic()
    for run in runs:
        try:
            run.close(status, deadline_s=started_s + run.closing_s)
        except Exception as error:
            logger.warning("%s: %s: %s", run._name, type(error).__name__, mask_secrets(str(error)))


class _UnendedRuns:
    """The runs to close when the process ends."""

    def __init__(self) -> None:
        self._runs: set[TrackerRun[Any]] = set()
        self._cancel: Callable[[], None] | None = None

    def add(self, run: TrackerRun[Any]) -> None:
        self._runs.add(run)
        if self._cancel is None:
            self.come_first()

    def remove(self, run: TrackerRun[Any]) -> None:
        self._runs.discard(run)

    def come_first(self) -> None:
        """Move our exit hook ahead of hooks that tracker libraries registered since.

        Their hooks end their threads or processes, after which nothing can be sent.
        """
        if self._cancel is not None:
            self._cancel()
        self._cancel = on_process_end(self._close)

    def _close(self, status: str) -> None:
        close_together(list(self._runs), status)


_RUNS = _UnendedRuns()
