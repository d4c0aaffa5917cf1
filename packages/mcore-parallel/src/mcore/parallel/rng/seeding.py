"""Seeds of the random number streams of a rank in a model-parallel job."""

from __future__ import annotations

import operator
from itertools import combinations

import torch

from mcore.parallel.groups import get_pg_rank
from mcore.parallel.process_groups.default import group_or_default
from mcore.parallel.rng.shared import TrackerFlags, ensure_tracker
from mcore.parallel.rng.state import default_generator, resolve_rng_device
from mcore.parallel.rng.tracker import (
    _DATA_PARALLEL_RNG_TRACKER_NAME,
    _EXPERT_PARALLEL_RNG_TRACKER_NAME,
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    CudaRNGStatesTracker,
)

# Megatron-LM's offsets: 2718 from e, 2 ** 10, and room for a hundred expert tensor ranks. Other
# values would change the numbers of runs that are resumed here.
MODEL_OFFSET = 2718
EXPERT_OFFSET = 1024
EXPERT_STRIDE = 100
MAX_SEED = 2**64 - 1


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
    ranks = [
        _find_rank("tp", tp_rank),
        _find_rank("ep", ep_rank),
        _find_rank("expt_tp", etp_rank),
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
    seeds = {
        _DATA_PARALLEL_RNG_TRACKER_NAME: seed,
        _MODEL_PARALLEL_RNG_TRACKER_NAME: seed + MODEL_OFFSET + tp_rank,
        _EXPERT_PARALLEL_RNG_TRACKER_NAME: seed
        + EXPERT_OFFSET
        + EXPERT_STRIDE * ep_rank
        + etp_rank,
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


def _find_rank(group_name: str, given: int | None) -> int:
    return get_pg_rank(group_or_default(None, group_name)) if given is None else given


def _require_natural(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} must be an int >= 0, got {value!r}")
    return number
