"""The shared tracker of random number streams of a process: its kind, its seeds, its access."""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch

from mcore.parallel.groups import get_pg_rank
from mcore.parallel.process_groups.default import group_or_default
from mcore.parallel.rng.state import (
    clone_rng_state,
    default_generator,
    read_generators,
    resolve_rng_device,
)
from mcore.parallel.rng.tracker import (
    _DATA_PARALLEL_RNG_TRACKER_NAME,
    _EXPERT_PARALLEL_RNG_TRACKER_NAME,
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    CudaRNGStatesTracker,
    Moment,
    RngTracker,
    Snapshot,
    new_stream_seed,
)
from mcore.versioning import get_te_version, is_te_min_version

logger = logging.getLogger(__name__)

TE_MODULE = "transformer_engine.pytorch.distributed"
MIN_TE_VERSION = "1.5.0"

# Megatron-LM's offsets: 2718 from e, 2 ** 10, and room for a hundred expert tensor ranks. Other
# values would change the numbers of runs that are resumed here.
MODEL_OFFSET = 2718
EXPERT_OFFSET = 1024
EXPERT_STRIDE = 100
MAX_SEED = 2**64 - 1


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
    te_tracker = getattr(sys.modules.get(TE_MODULE), "CudaRNGStatesTracker", ())
    return isinstance(tracker, te_tracker) or bool(getattr(tracker, "use_cudagraphable_rng", False))


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
    *,
    device: int | str | torch.device | None = None,
) -> None:
    """Seed a device's default random numbers and the shared tracker's three streams.

    Local to the process, no communication. The tracker is reset first, then gets the streams

    - ``data-parallel-rng``: ``seed``, as do the default random numbers
    - ``model-parallel-rng``: ``seed + 2718 + tp_rank``
    - ``expert-parallel-rng``: ``seed + 1024 + 100 * ep_rank + etp_rank``

    by Megatron-LM's formula. For pipeline stages that must differ pass ``seed + 100 * pp_rank``.
    This is also the step between expert-parallel ranks: ``ep_rank`` 1 of one stage then shares its
    expert stream with ``ep_rank`` 0 of the next stage. Model and expert streams of two ranks are
    different if ``100 * ep_rank + etp_rank < 1694``, and expert streams if ``etp_rank < 100``.

    Args:
        seed: Seed of the job, an int >= 0, equal on all ranks that share data-parallel numbers.
        te_rng_tracker: As ``use_te_rng_tracker`` of ``initialize_rng_tracker``.
        inference_rng_tracker: As for ``initialize_rng_tracker``.
        use_cudagraphable_rng: As for ``initialize_rng_tracker``.
        tp_rank: Tensor-parallel rank. Default this rank in ``tp`` of the default
            ``ProcessGroups``, else 0.
        ep_rank: Expert-parallel rank. Default this rank in ``ep``.
        etp_rank: Expert-tensor-parallel rank. Default this rank in ``expt_tp``.
        force_reset_rng: Make a new tracker, with these flags, even if there is one.
        device: Device to seed. Default the tracker's, which is the current accelerator or the CPU.
            TransformerEngine's streams are always on the current CUDA device.

    Raises:
        ValueError: A seed or rank is negative or not an int, a seed exceeds 64 bits, or two of the
            rank's seeds are equal. The old tracker is unchanged.
        RuntimeError: TransformerEngine is requested but too old, or the device does not exist.

    Example:
        >>> model_parallel_cuda_manual_seed(1234, tp_rank=1, force_reset_rng=True, device="cpu")
        >>> from mcore.parallel.rng import get_cuda_rng_tracker
        >>> sorted(get_cuda_rng_tracker().get_states())
        ['data-parallel-rng', 'expert-parallel-rng', 'model-parallel-rng']
        >>> torch.initial_seed()
        1234
    """
    given = {"tp": tp_rank, "ep": ep_rank, "expt_tp": etp_rank}
    ranks = [
        get_pg_rank(group_or_default(None, name)) if rank is None else rank
        for name, rank in given.items()
    ]
    seeds = rng_stream_seeds(seed, *ranks)
    wanted = None if device is None else resolve_rng_device(device)
    flags = TrackerFlags(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    tracker = ensure_tracker(flags, force_reset_rng, stacklevel=3)
    tracker.reset()
    if isinstance(tracker, CudaRNGStatesTracker):
        if wanted is not None:
            tracker.device = wanted
        wanted = tracker.device
    target = resolve_rng_device(-1) if wanted is None else wanted
    default_generator(target).manual_seed(seeds[_DATA_PARALLEL_RNG_TRACKER_NAME])
    for name, stream_seed in seeds.items():
        tracker.add(name, stream_seed)


def rng_stream_seeds(
    seed: int, tp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0
) -> dict[str, int]:
    """Return the seeds of a rank's data, model and expert stream. ValueError if two are equal."""
    numbers = {"seed": seed, "tp_rank": tp_rank, "ep_rank": ep_rank, "etp_rank": etp_rank}
    seed, tp_rank, ep_rank, etp_rank = (_require_natural(*item) for item in numbers.items())
    expert_seed = seed + EXPERT_OFFSET + EXPERT_STRIDE * ep_rank + etp_rank
    seeds = {
        _DATA_PARALLEL_RNG_TRACKER_NAME: seed,
        _MODEL_PARALLEL_RNG_TRACKER_NAME: seed + MODEL_OFFSET + tp_rank,
        _EXPERT_PARALLEL_RNG_TRACKER_NAME: expert_seed,
    }
    given = ", ".join(f"{name}={value}" for name, value in numbers.items())
    for first, second in combinations(seeds, 2):
        if seeds[first] == seeds[second]:
            raise ValueError(
                f"{first} and {second} would both have seed {seeds[first]} with {given}: their "
                "numbers would be equal. Number the ranks differently, or add() streams yourself"
            )
    if max(seeds.values()) > MAX_SEED:
        raise ValueError(f"a stream's seed exceeds 64 bits with {given}: choose a smaller seed")
    return seeds


def _require_natural(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    return number


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
    if flags.use_te_rng_tracker and is_te_min_version("0.0.0"):
        return _make_te_tracker(flags.inference_rng_tracker)
    if flags.use_te_rng_tracker:
        logger.warning(
            "use_te_rng_tracker: TransformerEngine is not installed "
            "(pip install 'mcore-parallel[te]'): using the tracker of mcore.parallel"
        )
    return CudaRNGStatesTracker(flags.use_cudagraphable_rng, flags.inference_rng_tracker)


def _make_te_tracker(is_inference_rng_tracker: bool) -> RngTracker:
    """Make a tracker on top of TransformerEngine's."""
    if not is_te_min_version(MIN_TE_VERSION):
        raise RuntimeError(
            f"use_te_rng_tracker needs TransformerEngine >= {MIN_TE_VERSION}, found "
            f"{get_te_version()}: upgrade it (pip install 'mcore-parallel[te]') or turn the flag "
            "off"
        )
    try:
        base = importlib.import_module(TE_MODULE).CudaRNGStatesTracker
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(
            f"use_te_rng_tracker: TransformerEngine {get_te_version()} is installed, but its "
            f"tracker {TE_MODULE}.CudaRNGStatesTracker cannot be imported: {error}"
        ) from error
    tracker: RngTracker = _adapt_class(base)(is_inference_rng_tracker)
    return tracker


@functools.cache
def _adapt_class(base: Any) -> Any:
    class TECudaRNGStatesTracker(base):  # type: ignore[misc]
        """TransformerEngine's tracker with the checks and states of CudaRNGStatesTracker."""

        def __init__(self, is_inference_rng_tracker: bool) -> None:
            self.is_inference_rng_tracker = is_inference_rng_tracker
            super().__init__()
            self.reset()

        def is_initialized(self) -> bool:
            return self._is_initialized

        def reset(self) -> None:
            super().reset()
            self._is_initialized = False

        def get_states(self, *, clone: bool = False) -> dict[str, Any]:
            states = dict(super().get_states())
            return {n: clone_rng_state(s) for n, s in states.items()} if clone else states

        def set_states(self, states: Mapping[str, Any]) -> None:
            if self.is_inference_rng_tracker:
                return
            super().set_states(dict(states))
            self.seeds_: set[int] = set()
            self._is_initialized = True

        def add(self, name: str, seed: int) -> None:
            if self.is_inference_rng_tracker:
                return
            seed = new_stream_seed(name, seed, self.states_, self.seeds_)
            super().add(name, seed)
            self._is_initialized = True

        def fork(
            self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, *, check_cpu: bool = True
        ) -> AbstractContextManager[None]:
            if self.is_inference_rng_tracker:
                return nullcontext()
            forked: AbstractContextManager[None] = super().fork(name)
            return forked

        def snapshot(self) -> AbstractContextManager[None]:
            return Snapshot(self) if self._is_initialized else nullcontext()

        def capture_moment(self) -> Moment:
            states = self.get_states()
            return Moment(states, self.seeds_, read_generators(states.values()), [], None)

        def restore_moment(self, moment: Moment) -> None:
            self.set_states(moment.states)
            self.seeds_ = moment.seeds

    return TECudaRNGStatesTracker
