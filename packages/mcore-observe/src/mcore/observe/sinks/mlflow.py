"""MLflow metrics: the names that it takes, and runs opened elsewhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.observe.sinks.plain_numbers import plain_numbers

__all__ = ["MlflowSink", "sanitize_metric_name"]

_REFUSED = re.compile(r"[^\w/.\- :]")
_LONGEST_NAME = 250


def sanitize_metric_name(name: str) -> str:
    """Turn a metric's name into one that every MLflow store takes.

    ``@`` becomes ``_at_``; of the slashes only the first one between two texts stays, runs
    counting as one, and others become ``_``, because a metric cannot be a folder of another one
    in file-like stores; all but letters, digits and ``_ / . - : space`` becomes ``_``, and so do
    two dots and more at the start. Names end after 250 characters; an empty one becomes ``_``.

    Args:
        name: The name.

    Returns:
        The name for MLflow.

    Example:
        >>> sanitize_metric_name("throughput//tflops/device")
        'throughput/tflops_device'
        >>> sanitize_metric_name("acc@5 (%)")
        'acc_at_5 ___'
    """
    return _sanitized(str(name))


@functools.lru_cache(maxsize=16384)
def _sanitized(name: str) -> str:
    head, _, tail = re.sub("/+", "/", name.replace("@", "_at_")).partition("/")
    tail = tail.replace("/", "_")
    text = f"{head}/{tail}" if head else f"_{tail}"
    head, _, tail = text[:_LONGEST_NAME].partition("/")
    return f"{_part(head)}/{_part(tail)}" if tail else _part(head)


def _part(text: str) -> str:
    clean = _REFUSED.sub("_", text)
    if clean == "." or clean.startswith(".."):
        dots = len(clean) - len(clean.lstrip("."))
        return "_" * dots + clean[dots:]
    return clean


class MlflowSink:
    """Hands metrics to anything with ``log_metrics(dict, step=...)``, under sanitized names.

    Args:
        client: A run of :class:`mcore.observe.sinks.mlflow_run.MlflowRun`, or the ``mlflow``
            module with a run open.

    Example:
        >>> class Client:
        ...     def log_metrics(self, metrics, step):
        ...         print(metrics, step)
        >>> MlflowSink(Client()).log({"acc@5": 0.5}, 1)
        {'acc_at_5': 0.5} 1
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics in one call, or more where sanitized names repeat."""
        for batch in _batches_of_unique_names(plain_numbers(metrics)):
            self._client.log_metrics(batch, step=step)

    def flush(self) -> None:
        """Flush the client: its ``flush``, else MLflow's ``flush_async_logging``."""
        flush = getattr(self._client, "flush", None) or self._client.flush_async_logging
        flush()

    def close(self) -> None:
        """Close the client: its ``close``, else MLflow's ``end_run``."""
        close = getattr(self._client, "close", None) or self._client.end_run
        close()


def _batches_of_unique_names(metrics: Mapping[str, float]) -> Iterator[dict[str, float]]:
    batch: dict[str, float] = {}
    for name, value in metrics.items():
        clean = sanitize_metric_name(name)
        if clean in batch:
            yield batch
            batch = {}
        batch[clean] = value
    if batch:
        yield batch
