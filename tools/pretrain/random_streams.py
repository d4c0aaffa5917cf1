"""The random streams of a rank: seeded by its place in the layout, saved and put back."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from mcore.parallel import (
    ProcessGroups,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from mcore.parallel.rng import _get_cuda_rng_state, _set_cuda_rng_state

_DATA_PARALLEL_STRIDE = 100_003


def seed_streams(seed: int, groups: ProcessGroups, device: torch.device) -> None:
    """Seed the streams: the default one equal within a tp group, the model-parallel one not.

    Replicas over dp and cp see other data, so all their streams differ.
    """
    own = seed + _DATA_PARALLEL_STRIDE * groups.rank("dp_cp")
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(
        own, tp_rank=groups.rank("tp"), ep_rank=0, etp_rank=0, device=device
    )


def stream_for(*, differs_over_tp: bool) -> AbstractContextManager[None]:
    """Draw, while it lasts, for what is another part on each tp rank, or equal on all of them."""
    return get_cuda_rng_tracker().fork() if differs_over_tp else contextlib.nullcontext()


def save_streams(device: torch.device) -> dict[str, Any]:
    """States of the CPU stream, the device's stream and the tracker's streams."""
    return {
        "cpu": torch.get_rng_state(),
        "device": _get_cuda_rng_state(device),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def restore_streams(states: dict[str, Any], device: torch.device) -> None:
    """Put back what ``save_streams`` returned."""
    torch.set_rng_state(states["cpu"])
    _set_cuda_rng_state(states["device"], device)
    get_cuda_rng_tracker().set_states(states["tracker"])
