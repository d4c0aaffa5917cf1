"""Calls that behave differently after the move, and how to adapt each."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .table import Home

# The position of a call's group. Other calls accept groups only by keyword.
GROUP_PLACES = {
    "drain_embedding_wgrad_compute": 4,
    "get_batch_on_this_cp_rank": 1,
    "get_data_parallel_group_if_dtensor": 1,
    "get_pg_rank": 0,
    "get_pg_size": 0,
    "get_pg_src_rank": 0,
    "get_tensor_model_parallel_group_if_none": 0,
    "GlobalSymmetricMemoryBuffer": 1,
    "logical_and_across_model_parallel_group": 1,
    "reduce_max_memory_across_pp_group": 1,
    "reduce_max_stat_across_model_parallel_group": 1,
}
# Their calls without a group or a mesh need no note.
_WITHOUT_NOTE = (
    *("contains_submesh", "get_mesh_names", "FSDPDistributedIndex"),
    *("get_batch_on_this_tp_rank", "log_single_rank", "MegatronModule"),
)
# Names that stay with Megatron in a tree that imports its checkpoints or its data parallelism: the
# entries of their sharded state dicts are mcore's, until the tree converts them.
CHECKPOINT_NAMES = (
    "Float16Module",
    "GraphableMegatronModule",
    "MegatronModule",
    "make_sharded_tensor_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "unwrap_model",
)
_VERSION_CHECKS = {f"is_{one}_min_version" for one in ("torch", "te", "fa", "mamba")}


def differences(home: Home, call: cst.Call, *, is_statement: bool) -> Iterator[str]:
    """The differences of a call of a moved name, a sentence each.

    Args:
        home: The called name.
        call: The call.
        is_statement: Whether nothing uses its result.
    """
    if home.difference:
        yield home.difference
    unpacked = any(argument.star for argument in call.args)
    positional = [one for one in call.args if not one.star and one.keyword is None]
    by_name = {one.keyword.value: one.value for one in call.args if one.keyword is not None}
    if home.positional is not None and len(positional) > home.positional:
        yield f"accepts {home.positional} positional arguments: name the others"
    is_noted = home.absent_group and home.name not in _WITHOUT_NOTE and not unpacked
    if is_noted and _has_no_group(home.name, positional, by_name):
        yield f"no group is given, which now means: {home.absent_group}"
    if home.name == "FSDPDistributedIndex" and len(positional) > 5:
        yield "releases since 0.17 have another order from the sixth position on: name them"
    if home.name == "unwrap_model" and len(positional) + len(by_name) == 1:
        yield "also removes wrappers of torch (DDP, FSDP, compile) and registered classes"
    if home.name == "get_batch_on_this_cp_rank" and len(positional) > 1:
        yield "the second position is the group, but is_hybrid_cp since Megatron 0.18: name it"
    if home.name == "get_batch_on_this_cp_rank" and is_statement:
        yield "returns a new dict and does not change the batch: use the result"
    equality = by_name.get("check_equality") or (
        positional[1].value if len(positional) > 1 else None
    )
    if home.name in _VERSION_CHECKS and _is_word(equality, "False"):
        yield "an equal version with a local part (2.13.0+cpu for 2.13.0) no longer counts as newer"


def _has_no_group(
    name: str, positional: list[cst.Arg], by_name: dict[str, cst.BaseExpression]
) -> bool:
    place = GROUP_PLACES.get(name, len(positional))
    if len(positional) > place:
        return _is_word(positional[place].value, "None")
    return all(_is_word(one, "None") for name, one in by_name.items() if is_group(name))


def is_group(argument: str) -> bool:
    """Whether an argument is a process group, or a collection of groups, by its name."""
    return argument.endswith("group") or argument == "pg_collection"


def _is_word(expression: cst.BaseExpression | None, word: str) -> bool:
    return isinstance(expression, cst.Name) and expression.value == word
