"""Memory of the device, or of the process where there is no accelerator, as a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["MEMORY_KEYS", "MEMORY_KEYS_TABLE", "report_memory"]

# Statistic of torch's allocator -> reported name. "mem-alloc-retires" is Megatron-LM's spelling,
# which dashboards know.
MEMORY_KEYS: dict[str, str] = {
    "allocated_bytes.all.current": "mem-allocated-bytes",
    "active_bytes.all.current": "mem-active-bytes",
    "inactive_split_bytes.all.current": "mem-inactive-bytes",
    "reserved_bytes.all.current": "mem-reserved-bytes",
    "allocated_bytes.all.peak": "mem-max-allocated-bytes",
    "active_bytes.all.peak": "mem-max-active-bytes",
    "inactive_split_bytes.all.peak": "mem-max-inactive-bytes",
    "reserved_bytes.all.peak": "mem-max-reserved-bytes",
    "num_alloc_retries": "mem-alloc-retires",
    "allocation.all.current": "mem-allocated-count",
}

# The names of the documented table, to pass as ``memory_keys``.
MEMORY_KEYS_TABLE: dict[str, str] = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}

_HOST_KEYS = {
    "host_rss_bytes.current": "mem-host-rss-bytes",
    "host_rss_bytes.peak": "mem-max-host-rss-bytes",
}


def report_memory(
    memory_keys: Mapping[str, str] | None, *, reset_peak: bool = False
) -> dict[str, float | int]:
    """Report memory statistics of this rank's accelerator.

    Statistics in bytes are given in gigabytes (1e9 bytes) with five significant digits, and
    ``bytes`` in the reported name becomes ``gigabytes``; counts stay ints. No communication.

    Args:
        memory_keys: Which statistics of ``torch.accelerator.memory_stats()``, and the names to
            report them under; None or empty takes :data:`MEMORY_KEYS`.
        reset_peak: Start the peaks again after reading them. Else they are since the start of the
            process.

    Returns:
        Values by name in the order of the keys; statistics that do not exist are left out.
        Without an accelerator there are none, but for None the resident memory of the process, as
        ``mem-host-rss-gigabytes`` and ``mem-max-host-rss-gigabytes``.

    Example:
        >>> all(value >= 0 for value in report_memory(None).values())
        True
    """
    if not torch.accelerator.is_available():
        return _in_gigabytes(_host_stats(), _HOST_KEYS) if memory_keys is None else {}
    report = _in_gigabytes(torch.accelerator.memory_stats(), memory_keys or MEMORY_KEYS)
    if reset_peak:
        torch.accelerator.reset_peak_memory_stats()
    return report


def _in_gigabytes(
    stats: Mapping[str, int], memory_keys: Mapping[str, str]
) -> dict[str, float | int]:
    report: dict[str, float | int] = {}
    for key, name in memory_keys.items():
        if key not in stats:
            continue
        if "bytes" in key:
            report[name.replace("bytes", "gigabytes")] = float(f"{stats[key] / 1e9:.5g}")
        else:
            report[name] = stats[key]
    return report


def _host_stats() -> dict[str, int]:
    stats: dict[str, int] = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        stats["host_rss_bytes.current"] = int(statm.read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        stats["host_rss_bytes.peak"] = max(peak, stats.get("host_rss_bytes.current", 0))
    return stats
