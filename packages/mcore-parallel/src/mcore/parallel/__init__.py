"""Process groups, device meshes, RNG streams, context-parallel slicing and sharded checkpoints."""

from mcore.parallel._version import __version__
from mcore.parallel.batches import flatten_batch_for_packed_sequences, get_batch_on_this_tp_rank
from mcore.parallel.checkpoint import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from mcore.parallel.context_parallel import cp_unzigzag, cp_zigzag_index, get_batch_on_this_cp_rank
from mcore.parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore.parallel.fsdp_index import FSDPDistributedIndex, using_tensor_parallel
from mcore.parallel.groups import get_pg_rank, get_pg_size, get_pg_src_rank
from mcore.parallel.mesh import contains_submesh, get_mesh_names, resolve_submesh
from mcore.parallel.process_groups import (
    ProcessGroupCollection,
    ProcessGroups,
    clear_default_process_groups,
    get_default_process_groups,
    get_tensor_model_parallel_group_if_none,
    set_default_process_groups,
    use_process_groups,
)
from mcore.parallel.reductions import (
    logical_and_across_model_parallel_group,
    reduce_max_memory_across_pp_group,
    reduce_max_stat_across_model_parallel_group,
    reduce_step_stats,
)
from mcore.parallel.regions import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mcore.parallel.replicas import check_param_hashes_across_dp_replicas
from mcore.parallel.rng import (
    CudaRNGStatesTracker,
    checkpoint_activations,
    checkpoint_context_fn,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
    replay_rng_streams,
)
from mcore.parallel.tensor_parallel import (
    copy_tensor_model_parallel_attributes,
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)
from mcore.parallel.wgrad import (
    drain_embedding_wgrad_compute,
    prepare_input_tensors_for_wgrad_compute,
)

__all__ = [
    "CudaRNGStatesTracker",
    "FSDPDistributedIndex",
    "ProcessGroupCollection",
    "ProcessGroups",
    "__version__",
    "all_to_all",
    "check_param_hashes_across_dp_replicas",
    "checkpoint_activations",
    "checkpoint_context_fn",
    "clear_default_process_groups",
    "contains_submesh",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "cp_unzigzag",
    "cp_zigzag_index",
    "drain_embedding_wgrad_compute",
    "flatten_batch_for_packed_sequences",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_cuda_rng_tracker",
    "get_default_process_groups",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "get_pg_rank",
    "get_pg_size",
    "get_pg_src_rank",
    "get_tensor_model_parallel_group_if_none",
    "initialize_rng_tracker",
    "is_mcore_tensor_model_parallel",
    "is_mcore_tensor_parallel_duplicated",
    "logical_and_across_model_parallel_group",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate",
    "prepare_input_tensors_for_wgrad_compute",
    "reduce_from_tensor_model_parallel_region",
    "reduce_max_memory_across_pp_group",
    "reduce_max_stat_across_model_parallel_group",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_step_stats",
    "replay_rng_streams",
    "resolve_submesh",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_default_process_groups",
    "set_tensor_model_parallel_attributes",
    "use_process_groups",
    "using_tensor_parallel",
    "vocab_parallel_cross_entropy",
]
