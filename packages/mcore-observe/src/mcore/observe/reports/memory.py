"""Memory reports of this rank, and snapshots of the CUDA allocator with its history."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mcore.versioning.process_rank import process_rank

logger = logging.getLogger(__name__)

_MAX_EVENTS = 100_000

# Statistic of torch's allocator -> reported name. "mem-alloc-retires" is Megatron-LM's spelling,
# which existing dashboards use.
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

# The names in Megatron-Bridge's documentation, to pass as ``memory_keys``.
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

    Statistics in bytes are reported in gigabytes (1e9 bytes) with five significant digits, and
    ``bytes`` in the reported name becomes ``gigabytes``. Counts stay ints. No communication.

    Args:
        memory_keys: Statistics of ``torch.accelerator.memory_stats()``, each with the name to
            report it under. None or empty means :data:`MEMORY_KEYS`.
        reset_peak: Restart the peaks after reading them. Otherwise they count from the start of
            the process.

    Returns:
        Values by name in the order of the keys, without statistics that do not exist. Without an
        accelerator it is empty, or for None the resident memory of the process:
        ``mem-host-rss-gigabytes`` and ``mem-max-host-rss-gigabytes``.

    Example:
        >>> all(value >= 0 for value in report_memory(None).values())
        True
    """
    if not torch.accelerator.is_available():
        return _name_stats(_read_host(), _HOST_KEYS) if memory_keys is None else {}
    report = _name_stats(torch.accelerator.memory_stats(), memory_keys or MEMORY_KEYS)
    if reset_peak:
        torch.accelerator.reset_peak_memory_stats()
    return report


def _name_stats(stats: Mapping[str, int], memory_keys: Mapping[str, str]) -> dict[str, float | int]:
    """Return statistics under their names, bytes in gigabytes."""
    report: dict[str, float | int] = {}
    for key, name in memory_keys.items():
        if key not in stats:
            continue
        if "bytes" in key:
            report[name.replace("bytes", "gigabytes")] = float(f"{stats[key] / 1e9:.5g}")
        else:
            report[name] = stats[key]
    return report


def _read_host() -> dict[str, int]:
    stats: dict[str, int] = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        stats["host_rss_bytes.current"] = int(statm.read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        stats["host_rss_bytes.peak"] = max(peak, stats.get("host_rss_bytes.current", 0))
    return stats


def start_memory_history_recording(profiling: Any) -> None:
    """Make the CUDA allocator record its history, and save a snapshot when memory runs out.

    Call it before the model is built, to trace every allocation to the code. Up to 100 000 events
    are kept, with Python stacks. A failing allocation saves ``{base}_oom_rank-{rank}{extension}``
    next to the configured path. A second call does nothing. Without CUDA it only logs one warning.
    No communication.

    Args:
        profiling: :class:`mcore.observe.ProfilingConfig`, an object with its
            ``record_memory_history``, ``profile_ranks`` and ``memory_snapshot_path``, or None.

    Example:
        >>> start_memory_history_recording(None)
    """
    if _is_recording_rank(profiling):
        _start_recording(profiling.memory_snapshot_path, process_rank())


def save_snapshot_at_profile_end(profiling: Any, iteration: int) -> None:
    """Save ``{base}_{rank}{extension}`` if this is the last step of the profile on this rank.

    A failure gives a warning, never an exception. No communication.
    """
    if profiling is None or getattr(profiling, "profile_step_end", None) != iteration:
        return
    if not _is_recording_rank(profiling):
        return
    if not torch.cuda.is_available():
        _warn_no_cuda()
        return
    path = snapshot_path(profiling.memory_snapshot_path, f"_{process_rank()}")
    try:
        _save_snapshot(path)
    except Exception as error:
        logger.warning(
            "could not save a memory snapshot to %s: %s: %s", path, type(error).__name__, error
        )
        return
    if process_rank() == 0:
        print(f"Saved memory snapshot to {path}", flush=True)  # noqa: T201


def snapshot_path(configured: str, suffix: str) -> str:
    """Put a suffix between the base and the extension of a path."""
    base, extension = os.path.splitext(configured)
    return f"{base}{suffix}{extension}"


def _is_recording_rank(profiling: Any) -> bool:
    if profiling is None or not getattr(profiling, "record_memory_history", False):
        return False
    return process_rank() in profiling.profile_ranks


@functools.cache
def _warn_no_cuda() -> None:
    logger.warning("record_memory_history needs CUDA, which is not available; nothing is recorded")


@functools.cache  # one observer for each process, however often recording is started
def _start_recording(configured: str, rank: int) -> None:
    if not torch.cuda.is_available():
        _warn_no_cuda()
        return
    torch.cuda.memory._record_memory_history(
        enabled="all", context="all", stacks="python", max_entries=_MAX_EVENTS
    )
    path = snapshot_path(configured, f"_oom_rank-{rank}")
    cuda: Any = torch._C  # CPU builds, and so the type stubs, lack the name
    cuda._cuda_attach_out_of_memory_observer(functools.partial(_save_after_failure, path))
    if rank == 0:
        logger.info(
            "rank %d records its memory history and saves %s if memory runs out", rank, path
        )


def _save_after_failure(path: str, *details: Any) -> None:
    try:  # this runs inside a failing allocation: no exception may replace torch's own error
        _save_snapshot(path)
        logger.error("out of memory: saved a snapshot to %s", path)
    except Exception:
        logger.exception("out of memory, and could not save a snapshot to %s", path)


def _save_snapshot(path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
    os.replace(partial, target)
