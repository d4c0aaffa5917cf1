"""The names that metrics have in MLflow."""

from __future__ import annotations

import functools
import re

# The sanitizer would make "throughput/tflops_device" of it, which no dashboard knows.
RENAMED = {"throughput/tflops/device": "throughput/tflops_per_device"}

_REFUSED = re.compile(r"[^\w/.\- :]")
_LONGEST_NAME = 250


def mlflow_metric_name(name: str) -> str:
    """Return the name under which a scalar of the training log is in MLflow.

    Args:
        name: The scalar's name, as other trackers and JSONL files have it.

    Returns:
        The sanitized name, and for the throughput of a device the one that dashboards know.

    Example:
        >>> mlflow_metric_name("throughput/tflops/device"), mlflow_metric_name("acc@5")
        ('throughput/tflops_per_device', 'acc_at_5')
    """
    return sanitize_metric_name(RENAMED.get(name, name))


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
