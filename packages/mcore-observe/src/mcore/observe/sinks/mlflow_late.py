"""An MLflow run that is opened in the background, while it takes metrics already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mcore.observe.metric_sender import StepMetrics
from mcore.observe.sinks.mlflow_run import MlflowRun

__all__ = ["LateMlflowRun"]


class LateMlflowRun(MlflowRun):
    """A run that a thread opens, so that training waits neither for the import nor for a server.

    Metrics that are logged before the run is open wait in their order. A run that cannot be opened
    is one WARNING; it is tried again until it can, unless MLflow is not installed or the arguments
    are wrong.

    Args:
        open_run: Opens the run, in a thread: :func:`open_mlflow` with its arguments, say. It is
            called again after it failed.
        name: What messages call the tracker.

    Attributes:
        client: As for :class:`MlflowRun`; None until the run is open.
        run_id: The run; empty until it is open.

    Example:
        >>> class Client:
        ...     def set_terminated(self, run_id, status):
        ...         print(run_id, status)
        >>> LateMlflowRun(lambda: MlflowRun(Client(), "r1")).close()
        r1 FINISHED
    """

    def __init__(self, open_run: Callable[[], MlflowRun], *, name: str = "MLflow") -> None:
        super().__init__(None, "", name=name)
        self._open_run = open_run
        self._opening = threading.Lock()
        self._first_error: Exception | None = None
        self._first_attempt = threading.Thread(
            target=self._try_to_open, name=f"mcore.observe opens {name}", daemon=True
        )
        self._first_attempt.start()

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self.client is not None

    def log_params(self, params: Mapping[str, str]) -> None:
        """Send settings once the run is open, waiting for that; see :class:`MlflowRun`.

        Args:
            params: Settings by name, without secrets.

        Raises:
            Exception: What opening the run or MLflow raised.
        """
        self._open()
        super().log_params(params)

    def flush(self) -> None:
        """Wait for the metrics as :class:`MlflowRun` does, but not until the run is open.

        Raises:
            Exception: The first error of a batch.
        """
        if self.is_open:
            super().flush()

    def close(self, status: str | None = None) -> None:
        """End the run as :class:`MlflowRun` does; one that is being opened is waited for, too.

        Args:
            status: As for :class:`MlflowRun`.

        Raises:
            Exception: A batch that did not arrive, or why the run could not be opened.
        """
        if not self._ended:
            started_s = time.monotonic()
            self._first_attempt.join(self.closing_s)
            self.closing_s = max(0.0, self.closing_s - (time.monotonic() - started_s))
        super().close(status)

    def _try_to_open(self) -> None:
        try:
            self._open()
        except Exception as error:
            self._first_error = error

    def _open(self) -> None:
        """Open the run unless it is open; raises what hinders that."""
        with self._opening:
            error, self._first_error = self._first_error, None
            if error is not None:
                raise error
            if not self.is_open:
                self._take_over(self._open_run())

    def _take_over(self, opened: MlflowRun) -> None:
        opened.release()
        self.run_id = opened.run_id
        self._writer = opened._writer
        self.last_steps = opened.last_steps
        self.client = opened.client

    def _send(self, entries: Sequence[StepMetrics]) -> None:
        self._open()
        super()._send(entries)

    def _is_away(self, error: Exception) -> bool:
        if self.is_open:
            return super()._is_away(error)
        return not isinstance(error, (ImportError, ValueError))

    def _end(self, status: str) -> None:
        if self.is_open:
            super()._end(status)
