"""Calls to an MLflow tracking server that are made once, so that the caller decides on retries."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

_RUNS = "/api/2.0/mlflow/runs"
_TIMEOUT_S = 30
_SHORT_TIMEOUT_S = 5


def is_tracking_server(uri: str) -> bool:
    """Return whether a tracking URI is that of a server reached by HTTP."""
    return uri.startswith(("http://", "https://"))


class TrackingServer:
    """Writes to runs of a tracking server, with the credentials that MLflow would use.

    MLflow's own client retries each call for four minutes with pauses of up to two, and warns
    each time. Here a call that fails is an error at once.

    Args:
        uri: Address of the server.

    Example:
        >>> TrackingServer("http://127.0.0.1:5000").check()  # doctest: +SKIP
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def check(self) -> None:
        """Send a small request, to learn within seconds whether the server answers.

        Raises:
            MlflowException: The server cannot be reached or refuses the request.
        """
        self._post("/api/2.0/mlflow/experiments/search", {"max_results": 1}, _SHORT_TIMEOUT_S)

    def log_batch(self, run_id: str, metrics: Sequence[Any]) -> None:
        """Write metrics.

        Args:
            run_id: The run.
            metrics: Up to 1000 ``mlflow.entities.Metric``; the same one may be sent again.

        Raises:
            MlflowException: The server cannot be reached or refuses the metrics.
        """
        entries = [
            {"key": m.key, "value": _as_json(m.value), "timestamp": m.timestamp, "step": m.step}
            for m in metrics
        ]
        self._post(f"{_RUNS}/log-batch", {"run_id": run_id, "metrics": entries}, _TIMEOUT_S)

    def set_terminated(self, run_id: str, status: str) -> None:
        """End a run.

        Args:
            run_id: The run.
            status: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.

        Raises:
            MlflowException: As :meth:`log_batch`.
        """
        end = {"run_id": run_id, "status": status, "end_time": int(time.time() * 1000)}
        self._post(f"{_RUNS}/update", end, _SHORT_TIMEOUT_S)

    def _post(self, endpoint: str, body: dict[str, Any], timeout_s: int) -> None:
        rest: Any = import_module("mlflow.utils.rest_utils")
        credentials: Any = import_module("mlflow.utils.credentials")
        response = rest.http_request(
            credentials.get_default_host_creds(self.uri),
            endpoint,
            "POST",
            max_retries=0,
            timeout=timeout_s,
            raise_on_status=False,
            json=body,
        )
        rest.verify_rest_response(response, endpoint)


def _as_json(value: float) -> float | str:
    """Spell what JSON has no number for as the server's parser does."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
