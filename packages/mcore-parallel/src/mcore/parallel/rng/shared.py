"""The shared tracker of random number streams of a process."""

from __future__ import annotations

import logging
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mcore.parallel.rng.tracker import CudaRNGStatesTracker, RngTracker
from mcore.parallel.rng.transformer_engine import is_te_tracker, make_te_tracker

logger = logging.getLogger(__name__)


class TrackerFlags(NamedTuple):
    """The requested kind of tracker. If all are False, any tracker is accepted."""

    use_te_rng_tracker: bool
    inference_rng_tracker: bool
    use_cudagraphable_rng: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


@dataclass(frozen=True)
class _Shared:
    """The tracker, its flags, and other requested flags that were warned about."""

    tracker: RngTracker
    flags: TrackerFlags
    refused: set[TrackerFlags] = field(default_factory=set)


_lock = threading.Lock()
_shared: _Shared | None = None


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make the shared tracker of the process, unless there is one.

    Local to the process, no communication. If a tracker exists, different flags have no effect
    and warn once. The default flags accept any tracker and never warn.

    Args:
        use_te_rng_tracker: Use TransformerEngine's tracker (>= 1.5.0), which supports CUDA graphs
            and FP8. Without TransformerEngine use this package's, with a logged warning.
        inference_rng_tracker: Use a tracker that leaves the random numbers unchanged.
        use_cudagraphable_rng: Use a tracker that CUDA graphs can capture.
        force_reset: Drop the existing tracker with its streams.

    Raises:
        RuntimeError: TransformerEngine is requested but too old.

    Example:
        >>> initialize_rng_tracker(force_reset=True)
        >>> get_cuda_rng_tracker().is_initialized()
        False
    """
    flags = TrackerFlags(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    ensure_tracker(flags, force_reset, stacklevel=3)


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> RngTracker:
    """Return the shared tracker of the process, made at the first call.

    Args:
        use_te_rng_tracker: As for ``initialize_rng_tracker``.
        inference_rng_tracker: As for ``initialize_rng_tracker``.
        use_cudagraphable_rng: As for ``initialize_rng_tracker``.

    Returns:
        The same object at every call, until it is reset by force.

    Raises:
        RuntimeError: TransformerEngine is requested but too old.

    Example:
        >>> get_cuda_rng_tracker() is get_cuda_rng_tracker()
        True
    """
    flags = TrackerFlags(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return ensure_tracker(flags, force_reset=False, stacklevel=3)


def get_all_rng_states() -> dict[str, Any]:
    """Return the states of the shared tracker's streams, e.g. to register them with a graph.

    Returns:
        A new dict, state by name. Empty if there is no tracker, and for an inference tracker. No
        tracker is made.

    Example:
        >>> isinstance(get_all_rng_states(), dict)
        True
    """
    tracker = existing_tracker()
    return {} if tracker is None or tracker.is_inference_rng_tracker else tracker.get_states()


def is_graph_safe_cuda_rng_tracker(tracker: object) -> bool:
    """Return whether forks of a tracker can be captured in CUDA graphs.

    Args:
        tracker: Any tracker, this package's or TransformerEngine's.

    Returns:
        True if its states are generators.

    Example:
        >>> is_graph_safe_cuda_rng_tracker(CudaRNGStatesTracker(use_cudagraphable_rng=True))
        True
    """
    return is_te_tracker(tracker) or bool(getattr(tracker, "use_cudagraphable_rng", False))


def existing_tracker() -> RngTracker | None:
    """Return the shared tracker, or None if there is none."""
    shared = _shared
    return None if shared is None else shared.tracker


def ensure_tracker(flags: TrackerFlags, force_reset: bool, stacklevel: int) -> RngTracker:
    """Return the shared tracker, made if necessary. Warn once about flags other than its flags."""
    global _shared
    with _lock:
        shared = _shared
        if shared is None or force_reset:
            _shared = _Shared(_make_tracker(flags), flags)
            return _shared.tracker
        differs = any(flags) and flags != shared.flags and flags not in shared.refused
        if differs:
            shared.refused.add(flags)
    if differs:
        warnings.warn(
            f"rng tracker already initialised with {shared.flags}. Requested {flags}: use "
            "force_reset to replace it",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    return shared.tracker


def _make_tracker(flags: TrackerFlags) -> RngTracker:
    if flags.use_te_rng_tracker:
        tracker = make_te_tracker(flags.inference_rng_tracker)
        if tracker is not None:
            return tracker
        logger.warning(
            "use_te_rng_tracker: TransformerEngine is not installed "
            "(pip install 'mcore-parallel[te]'): using the tracker of mcore.parallel"
        )
    return CudaRNGStatesTracker(flags.use_cudagraphable_rng, flags.inference_rng_tracker)
