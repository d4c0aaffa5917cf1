"""Named random number streams, each shared by some ranks of a job and different on others."""

from mcore.parallel.rng.recompute import (
    checkpoint_activations,
    checkpoint_context_fn,
    replay_rng_streams,
)
from mcore.parallel.rng.shared import (
    get_all_rng_states,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from mcore.parallel.rng.state import (
    _get_cuda_rng_state,
    _set_cuda_rng_state,
    convert_cuda_rng_state,
)
from mcore.parallel.rng.tracker import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    CudaRNGStatesTracker,
    RNGStatesTracker,
    RngTracker,
    UnknownRngStreamError,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)

__all__ = [
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "CudaRNGStatesTracker",
    "RNGStatesTracker",
    "RngTracker",
    "UnknownRngStreamError",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "checkpoint_activations",
    "checkpoint_context_fn",
    "convert_cuda_rng_state",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "initialize_rng_tracker",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "replay_rng_streams",
]
