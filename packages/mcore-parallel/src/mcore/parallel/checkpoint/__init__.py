"""Sharded checkpoints: describe, validate, save and load the state dicts of many ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore.parallel.checkpoint.builders import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    sharded_state_dict_default,
)
from mcore.parallel.checkpoint.errors import CheckpointingException, DamagedCheckpointError
from mcore.parallel.checkpoint.figures import SaveHandle, SaveStats
from mcore.parallel.checkpoint.files.directory import (
    is_complete_checkpoint,
    keep_last,
    latest_checkpoint,
    list_checkpoints,
    remove_incomplete,
)
from mcore.parallel.checkpoint.hugging_face.hf_folder import load_hf, save_hf
from mcore.parallel.checkpoint.hugging_face.names import HFTensor, gpt2_names, llama_names
from mcore.parallel.checkpoint.load import load_sharded_state_dict
from mcore.parallel.checkpoint.objects import LocalNonpersistentObject, ShardedObject
from mcore.parallel.checkpoint.planning.description import ShardRecord
from mcore.parallel.checkpoint.planning.validation import (
    describe_shards,
    validate_plans,
    validate_sharding_integrity,
)
from mcore.parallel.checkpoint.run_state.manager import CheckpointManager
from mcore.parallel.checkpoint.run_state.training_state import (
    load_training_state,
    save_training_state,
)
from mcore.parallel.checkpoint.save import save_sharded_state_dict
from mcore.parallel.checkpoint.selection import LoadReport
from mcore.parallel.checkpoint.sharded import (
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from mcore.parallel.checkpoint.torch_file import from_torch, to_torch

if TYPE_CHECKING:
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner
    from mcore.parallel.checkpoint.planning.save_planner import ShardedSavePlanner

__all__ = [
    "CheckpointManager",
    "CheckpointingException",
    "CommonStateDict",
    "DamagedCheckpointError",
    "HFTensor",
    "LoadReport",
    "LocalNonpersistentObject",
    "ReplicaId",
    "SaveHandle",
    "SaveStats",
    "ShardRecord",
    "ShardedBase",
    "ShardedLoadPlanner",
    "ShardedObject",
    "ShardedSavePlanner",
    "ShardedStateDict",
    "ShardedTensor",
    "StateDict",
    "describe_shards",
    "ensure_metadata_has_dp_cp_group",
    "from_torch",
    "gpt2_names",
    "is_complete_checkpoint",
    "is_main_replica",
    "keep_last",
    "latest_checkpoint",
    "list_checkpoints",
    "llama_names",
    "load_hf",
    "load_sharded_state_dict",
    "load_training_state",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensor_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "remove_incomplete",
    "save_hf",
    "save_sharded_state_dict",
    "save_training_state",
    "sharded_state_dict_default",
    "to_torch",
    "validate_plans",
    "validate_sharding_integrity",
]


def __getattr__(name: str) -> Any:
    """Import the planners at their first use: torch.distributed.checkpoint takes seconds."""
    modules = {"ShardedLoadPlanner": "load_planner", "ShardedSavePlanner": "save_planner"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.planning.{modules[name]}"), name)
