"""A run of a tracker that is opened and written in the background; no training step waits."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from mcore.observe.sinks.base import plain_numbers
from mcore.observe.sinks.delivery.process_end import on_process_end
from mcore.observe.sinks.delivery.sender import MetricSender
from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool, SpoolOwner, StepMetrics
from mcore.observe.sinks.secrets import mask_secrets

logger = logging.getLogger(__name__)

_PREPARING_S = 120.0  # the longest import of a library that an orderly end waits for
_ENTRIES_PER_CALL = 20
_Client = TypeVar("_Client")


class BackgroundRun(abc.ABC, Generic[_Client]):
    """One run of a tracker, which may be logged to before it is open.

    Metrics wait in memory, and with a spool on the disk too. A tracker that cannot be opened or
    goes away is one WARNING and is retried, unless its library is missing or the settings are
    wrong. The run ends when the process does, if not before.

    Args:
        connect: Opens the run: called when it is first needed, and again after it failed.
        name: What messages call the tracker.
        spool: Keeps on the disk what has not arrived.
        closing_s: Seconds that :meth:`close` waits for a tracker that is away.
        max_per_call: Values that are written at once.
        earlier: What earlier starts of the run could not send; it is sent first.
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
            is_away=self._is_away,
            spool=spool,
            is_preparing=lambda: time.monotonic() < self._preparing_until_s,
            max_per_call=max_per_call,
        )
        self._ended = False
        self._has_finished = False
        self._ending = threading.RLock()
        _LIVING.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self._connection is not None

    @property
    def run_id(self) -> str:
        """The run's name in the tracker; empty until it is open."""
        return "" if self._connection is None else self._id_of(self._connection)

    @property
    def num_missing(self) -> int:
        """Values that were logged and that the tracker has not taken, or not yet."""
        return self.num_logged - self._num_settled

    def open(self) -> _Client:
        """Open the run unless it is open.

        Returns:
            What :attr:`connect` returned.

        Raises:
            Exception: Whatever prevents that.
        """
        with self._connecting:
            if self._connection is None:
                connection = self._connect()
                self._note_open(connection)
                self._connection = connection
            return self._connection

    def send_left(self, owner: SpoolOwner, up_to: int | None = None) -> int:
        """Send what a dead process left in a spool file, and remove the file.

        Args:
            owner: The file.
            up_to: The last step that is sent; later ones are dropped. None sends all.

        Returns:
            Values sent.
        """
        connection = self.open() if self._connection is None else self._connection
        return self._send_left(connection, owner, up_to)

    def open_in_background(self) -> None:
        """Start opening the run, so that nobody waits for an import or for a server."""
        self._sender.start()

    def flush(self) -> None:
        """Wait until all metrics have arrived, or until the tracker is found to be away.

        It does not wait for the run to be opened.

        Raises:
            Exception: The first error of a batch, after waiting for all.
        """
        if self.is_open:
            self._sender.flush()

    def release(self) -> None:
        """Flush and release the run without ending it; another object may continue it."""
        self._ended = True
        _LIVING.remove(self)
        self._has_finished = self._sender.close(self.closing_s)
        self._leave_spool()

    def begin_close(self, status: str | None = None) -> None:
        """Have the run ended in the background; :meth:`close` then waits for it."""
        if not self._ended and self._sender.has_thread:
            self.status = status or self.status
            self._sender.begin_close(self._finish)

    def close(self, status: str | None = None) -> None:
        """Flush and end the run; closing twice is fine, and the first status stays.

        A tracker that is away is waited for, and so is a run that is being opened,
        :attr:`closing_s` at most. Imports, and a tracker that answers, may take longer, unless the
        status is ``"KILLED"``.

        Args:
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``; None is :attr:`status`.

        Raises:
            Exception: A batch that was refused, or why the run could not be opened; the run is
                still ended.
        """
        with self._ending:
            if self._ended:
                return
            self.status = status or self.status
            self._close_by(time.monotonic() + self.closing_s)

    def _close_by(self, deadline_s: float) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended = True
            _LIVING.remove(self)
            self._leave_status()
            try:
                if self._sender.has_thread:
                    self._sender.begin_close(self._finish)
                    left_s = max(0.0, deadline_s - time.monotonic())
                    self._sender.close(left_s, at_once=self.status == "KILLED")
                else:
                    self._finish()
            finally:
                self._leave_spool()

    def _leave_status(self) -> None:
        if self._spool is not None and self.num_logged:
            self._spool.note({"status": self.status})

    def _leave_spool(self) -> None:
        if self._spool is None:
            return
        if self._has_finished and not self._spool.num_left:
            self._spool.remove()
        else:
            self._spool.leave()

    def _note_open(self, connection: _Client) -> None:
        _LIVING.come_first()
        run_id = self._id_of(connection)
        if self._spool is not None:
            self._spool.note({"run_id": run_id})
        if self._on_open is not None:
            self._on_open(run_id)
        if self._earlier is not None:
            for owner in self._earlier.of_run(run_id):
                self._send_left(connection, owner, self._earlier.up_to)

    def _send_left(self, connection: _Client, owner: SpoolOwner, up_to: int | None) -> int:
        left = owner.contents.entries.values()
        entries = [entry for entry in left if up_to is None or entry.step <= up_to]
        missing = self._without_known(connection, entries)
        for start in range(0, len(missing), _ENTRIES_PER_CALL):
            part = missing[start : start + _ENTRIES_PER_CALL]
            self._write(connection, part)
            owner.settle(part)
        owner.remove()
        return sum(len(entry.metrics) for entry in missing)

    def _without_known(
        self, connection: _Client, entries: Sequence[StepMetrics]
    ) -> Sequence[StepMetrics]:
        """Leave out what the tracker took before an earlier process died."""
        return entries

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, *, time_s: float | None = None
    ) -> None:
        """Send metrics of one step in the background.

        Args:
            metrics: Numbers by name; None is left out, NaN is kept.
            step: The step; None is 0.
            time_s: When they were measured, in seconds of ``time.time()``; None is now.

        Raises:
            RuntimeError: The run was closed.
            Exception: What the tracker raised for metrics sent earlier.
        """
        self._put(metrics, step, time_s)

    def _put(self, metrics: Mapping[str, Any], step: int | None, time_s: float | None) -> None:
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
            if not self._is_away(error):
                self._settle(entries)
            raise
        self._num_settled += sum(len(entry.metrics) for entry in entries)
        self._settle(entries)

    def _settle(self, entries: Iterable[StepMetrics]) -> None:
        if self._spool is not None:
            self._spool.settle(entries)

    def _is_away(self, error: Exception) -> bool:
        """Return whether the same call may succeed later."""
        if self.is_open:
            return isinstance(error, OSError)
        return not isinstance(error, (ImportError, ValueError))

    def _id_of(self, connection: _Client) -> str:
        """Return the run's name in the tracker."""
        return ""

    @abc.abstractmethod
    def _write(self, connection: _Client, entries: Sequence[StepMetrics]) -> None:
        """Hand entries to the tracker, waiting for it."""

    @abc.abstractmethod
    def _end(self, connection: _Client, status: str) -> None:
        """End the run, waiting for it."""

    def _finish(self) -> None:
        if self._connection is None:
            return
        try:
            self._end(self._connection, self.status)
        except Exception as error:
            if not self._is_away(error):
                raise
            logger.error(
                "%s is away and shows the run %s as running: %s",
                self._name,
                self.run_id,
                mask_secrets(str(error)),
            )
        else:
            self._has_finished = True

    def preparing(self) -> _Preparing:
        """Return a context for work of this process, which does not count as waiting."""
        return _Preparing(self)


class ClientRun(BackgroundRun[_Client]):
    """A background run with the attributes of the tracker's own client, waiting until it is open.

    Its own methods, which log, wait for nothing.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client_of(self.open()), name)

    def _client_of(self, connection: _Client) -> Any:
        """Return the tracker's own client."""
        return connection


class _Preparing:
    """Marks a run as busy with an import while it lasts."""

    def __init__(self, run: BackgroundRun[Any]) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run._preparing_until_s = time.monotonic() + _PREPARING_S

    def __exit__(self, *error: object) -> None:
        self._run._preparing_until_s = 0.0


def close_together(runs: Sequence[BackgroundRun[Any]], status: str | None = None) -> None:
    """Close runs at the same time, so that it takes as long as the slowest; errors are warnings."""
    for run in runs:
        run.begin_close(status)
    started_s = time.monotonic()
    for run in runs:
        run.status = status or run.status
        try:
            run._close_by(started_s + run.closing_s)
        except Exception as error:
            text = mask_secrets(str(error))
            logger.warning("%s: %s: %s", run._name, type(error).__name__, text)


class _Living:
    """The runs that are to be closed when the process ends."""

    def __init__(self) -> None:
        self._runs: set[BackgroundRun[Any]] = set()
        self._cancel: Callable[[], None] | None = None

    def add(self, run: BackgroundRun[Any]) -> None:
        self._runs.add(run)
        if self._cancel is None:
            self.come_first()

    def remove(self, run: BackgroundRun[Any]) -> None:
        self._runs.discard(run)

    def come_first(self) -> None:
        """Be called before what trackers' libraries have registered for the end meanwhile."""
        if self._cancel is not None:
            self._cancel()
        self._cancel = on_process_end(self._close)

    def _close(self, status: str) -> None:
        close_together(list(self._runs), status)


_LIVING = _Living()
