"""A run of a tracker that is opened and written in the background, while training continues."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mcore.observe.sinks.delivery.process_end import on_process_end
from mcore.observe.sinks.delivery.sender import MetricSender
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

    Metrics wait in memory, and with a spool on the disk too. A tracker that cannot be opened or
    stops responding is one WARNING and is retried, unless its library is missing or the settings
    are wrong. The end of the process ends the run, unless it has ended before.

    Args:
        connect: Opens the run: called when it is first needed, and after each failure.
        name: The tracker's name in messages.
        spool: Keeps metrics on the disk until they arrive.
        closing_s: Seconds that :meth:`close` waits for an unreachable tracker.
        max_per_call: Values that are written at once.
        earlier: Metrics that earlier starts of the run could not send. They are sent first.
        on_open: Called with the run's id once it is open.
    """

    def __init__(
        self,
        connect: Callable[[], _Client],
        *,
        name: str,
        spool: Spool | None = None,
        closing_s: float = 10.0,
        max_per_call: int = 1000,
        earlier: EarlierSpools | None = None,
        on_open: Callable[[str], None] | None = None,
    ) -> None:
        self.status = "FINISHED"
        self.closing_s = closing_s
        self.num_logged = 0
        self._num_settled = 0
        self._name = name
        self._connect = connect
        self._connection: _Client | None = None
        self._connecting = threading.Lock()
        self._preparing_until_s = 0.0
        self._spool = spool
        self._earlier = earlier
        self._on_open = on_open
        self._sender = MetricSender(
            name,
            self._send,
            is_unreachable=self._is_unreachable,
            spool=spool,
            is_preparing=lambda: time.monotonic() < self._preparing_until_s,
            max_per_call=max_per_call,
        )
        self._ended = False
        self._has_finished = False
        # Reentrant: close() holds it while it calls close_by().
        self._ending = threading.RLock()
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
        return self.num_logged - self._num_settled

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

    def send_left(self, owner: SpoolOwner) -> int:
        """Send the metrics that a dead process left in a spool file, and remove the file.

        Returns:
            Values sent.
        """
        return self._send_left(self.open(), owner, None)

    def open_in_background(self) -> None:
        """Start to open the run, without waiting for an import or a server."""
        self._sender.start()

    def flush(self) -> None:
        """Wait until all metrics have arrived, or until the tracker is found unreachable.

        It does not wait for the run to be opened.

        Raises:
            Exception: The first error of a batch, after waiting for all.
        """
        if self.is_open:
            self._sender.flush()

    def release(self) -> None:
        """Flush and release the run without ending it. Another object may continue it."""
        self._ended = True
        _RUNS.remove(self)
        self._has_finished = self._sender.close(self.closing_s)
        self._leave_spool()

    def begin_close(self, status: str | None = None) -> None:
        """Start to end the run in the background. :meth:`close` then waits for the end."""
        if not self._ended and self._sender.has_thread:
            self.status = status or self.status
            self._sender.begin_close(self._finish)

    def close(self, status: str | None = None) -> None:
        """Flush and end the run. Closing twice is fine, and the first status stays.

        It waits at most :attr:`closing_s` for an unreachable tracker or for a run that is being
        opened. Imports, and a tracker that responds, may take longer, unless the status is
        ``"KILLED"``.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``. None is :attr:`status`.

        Raises:
            Exception: A batch was refused, or the run could not be opened. The run is still ended.
        """
        with self._ending:
            if self._ended:
                return
            self.status = status or self.status
            self.close_by(time.monotonic() + self.closing_s)

    def close_by(self, deadline_s: float) -> None:
        """Close with the present status, and wait for the tracker until ``time.monotonic()``."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            _RUNS.remove(self)
            if self._spool is not None and self.num_logged:
                self._spool.note({"status": self.status})
            try:
                if self._sender.has_thread:
                    self._sender.begin_close(self._finish)
                    left_s = max(0.0, deadline_s - time.monotonic())
                    self._sender.close(left_s, at_once=self.status == "KILLED")
                else:
                    self._finish()
            finally:
                self._leave_spool()

    def _leave_spool(self) -> None:
        if self._spool is None:
            return
        if self._has_finished and not self._spool.num_left:
            self._spool.remove()
        else:
            self._spool.leave()

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
        return sum(len(entry.metrics) for entry in missing)

    def _drop_known(
        self, connection: _Client, entries: Sequence[StepMetrics]
    ) -> Sequence[StepMetrics]:
        """Drop metrics that arrived in the tracker before an earlier process died."""
        return entries

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
            raise RuntimeError(f"the {self._name} run {self.run_id} was closed; open it again")
        numbers = plain_numbers(metrics)
        self.num_logged += len(numbers)
        at_s = time.time() if time_s is None else time_s
        self._sender.put(StepMetrics(numbers, int(step or 0), int(at_s * 1000)))

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
        self._num_settled += sum(len(entry.metrics) for entry in entries)
        self._settle(entries)

    def _settle(self, entries: Iterable[StepMetrics]) -> None:
        if self._spool is not None:
            self._spool.settle(entries)

    def _is_unreachable(self, error: Exception) -> bool:
        """Return whether the same call may succeed later."""
        if self.is_open:
            return isinstance(error, OSError)
        return not isinstance(error, (ImportError, ValueError))

    def _get_run_id(self, connection: _Client) -> str:
        """Return the run's name in the tracker."""
        return ""

    @abc.abstractmethod
    def _write(self, connection: _Client, entries: Sequence[StepMetrics]) -> None:
        """Write entries to the tracker, waiting for it."""

    @abc.abstractmethod
    def _end(self, connection: _Client, status: str) -> None:
        """End the run, waiting for it."""

    def _finish(self) -> None:
        if self._connection is None:
            return
        try:
            self._end(self._connection, self.status)
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

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark the run as busy with work of this process, such as an import."""
        self._preparing_until_s = time.monotonic() + _PREPARING_S
        try:
            yield
        finally:
            self._preparing_until_s = 0.0


class ClientRun(TrackerRun[_Client]):
    """A run that also has the attributes of the tracker's client. Reading them waits for it.

    Methods of this class and its subclasses, which log, do not wait.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._get_client(self.open()), name)

    def _get_client(self, connection: _Client) -> Any:
        """Return the tracker's client."""
        return connection


def close_together(runs: Sequence[TrackerRun[Any]], status: str | None = None) -> None:
    """Close runs at the same time: it takes as long as the slowest. Errors are warnings."""
    for run in runs:
        run.begin_close(status)
    started_s = time.monotonic()
    for run in runs:
        run.status = status or run.status
        try:
            run.close_by(started_s + run.closing_s)
        except Exception as error:
            text = mask_secrets(str(error))
            logger.warning("%s: %s: %s", run._name, type(error).__name__, text)


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
