"""Snapshots of the CUDA allocator with its history: at the end of a profile, and out of memory."""

from __future__ import annotations

import functools
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from mcore.versioning.process_rank import process_rank

__all__ = ["save_snapshot_at_profile_end", "snapshot_path", "start_memory_history_recording"]

logger = logging.getLogger(__name__)

_MAX_EVENTS = 100_000


def start_memory_history_recording(profiling: Any) -> None:
    """Have the CUDA allocator record its history, and save a snapshot when memory runs out.

    Call it before the model is built, so that every allocation has its place in the code. Up to
    100 000 events are kept, with Python stacks. An allocation that fails saves
    ``{base}_oom_rank-{rank}{extension}`` next to the configured path. A second call does nothing;
    without CUDA there is one warning and nothing else. No communication.

    Args:
        profiling: Something with ``record_memory_history``, ``profile_ranks`` and
            ``memory_snapshot_path``, as :class:`mcore.observe.ProfilingConfig`, or None.

    Example:
        >>> start_memory_history_recording(None)
    """
    if _records_history(profiling):
        _start_recording(profiling.memory_snapshot_path, process_rank())


def save_snapshot_at_profile_end(profiling: Any, iteration: int) -> None:
    """Save ``{base}_{rank}{extension}`` if this is the last step of the profile on this rank.

    What goes wrong is a warning, never an exception. No communication.

    Args:
        profiling: As for :func:`start_memory_history_recording`, with ``profile_step_end``.
        iteration: The step.

    Example:
        >>> save_snapshot_at_profile_end(None, 1)
    """
    if profiling is None or getattr(profiling, "profile_step_end", None) != iteration:
        return
    if not _records_history(profiling):
        return
    if not torch.cuda.is_available():
        _warn_no_cuda()
        return
    path = snapshot_path(profiling.memory_snapshot_path, f"_{process_rank()}")
    try:
        _save_snapshot(path)
    except Exception as error:
        logger.warning("no memory snapshot in %s: %s: %s", path, type(error).__name__, error)
        return
    if process_rank() == 0:
        print(f"Saved memory snapshot to {path}", flush=True)  # noqa: T201


def snapshot_path(configured: str, suffix: str) -> str:
    """Put a suffix between the base and the extension of a path.

    Args:
        configured: The configured path.
        suffix: The suffix.

    Returns:
        The path of one snapshot.

    Example:
        >>> snapshot_path("x.pkl", "_7"), snapshot_path("snapshot.pickle", "_oom_rank-0")
        ('x_7.pkl', 'snapshot_oom_rank-0.pickle')
    """
    base, extension = os.path.splitext(configured)
    return f"{base}{suffix}{extension}"


def _records_history(profiling: Any) -> bool:
    if profiling is None or not getattr(profiling, "record_memory_history", False):
        return False
    return process_rank() in profiling.profile_ranks


@functools.cache
def _warn_no_cuda() -> None:
    logger.warning("record_memory_history needs CUDA, which is not available: nothing is recorded")


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
    cuda._cuda_attach_out_of_memory_observer(functools.partial(_on_out_of_memory, path))
    if rank == 0:
        logger.info("rank %d records its memory history; out of memory saves %s", rank, path)


def _on_out_of_memory(path: str, *details: Any) -> None:
    try:  # runs inside a failing allocation, which must fail as it would without us
        _save_snapshot(path)
        logger.error("out of memory: saved a snapshot to %s", path)
    except Exception:
        logger.exception("out of memory, and no snapshot in %s", path)


def _save_snapshot(path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
    os.replace(partial, target)
