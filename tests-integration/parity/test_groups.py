"""The groups of megatron-core as ProcessGroups and back, on four ranks."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.observe import calc_params_l2_norm
from mcore.parallel import (
    ProcessGroups,
    all_to_all,
    check_param_hashes_across_dp_replicas,
    get_batch_on_this_cp_rank,
    get_pg_size,
    get_tensor_model_parallel_group_if_none,
    reduce_from_tensor_model_parallel_region,
    reduce_max_stat_across_model_parallel_group,
    use_process_groups,
)
from rank_testing import run_ranks

SAME = ("tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "mp", "tp_ep", "tp_ep_pp", "expt_dp")


def exchange_groups() -> None:
    """Compare every field with the group that megatron-core gives for it."""
    state: Any = importlib.import_module("megatron.core.parallel_state")
    kind: Any = importlib.import_module("megatron.core.process_groups_config")
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        ProcessGroups.from_megatron()
    state.initialize_model_parallel(
        tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1, hierarchical_context_parallel_sizes=[2, 1],
    )  # fmt: skip
    theirs = kind.ProcessGroupCollection.use_mpu_process_groups()
    ours = ProcessGroups.from_megatron()
    assert ours.tp is state.get_tensor_model_parallel_group()
    assert ours.ep is state.get_expert_model_parallel_group()
    assert ours.hcp is state.get_hierarchical_context_parallel_groups()
    assert ours.embd is state.get_embedding_group()
    own = ProcessGroups.from_sizes(tp=2, cp=2, ep=2, expt_tp=1)
    for name in SAME:
        assert ours.ranks(name) == own.ranks(name), name
    back = ours.to_megatron()
    for field in dataclasses.fields(kind.ProcessGroupCollection):
        if field.name != "intra_dist_opt":
            given = getattr(theirs, field.name, None)
            assert getattr(back, field.name) is (given or None), field.name
    assert get_pg_size(own.to_megatron().intra_dist_opt) == 4
    # A function of ours takes Megatron's collection: the two halves of a weight of ones.
    config = SimpleNamespace(bf16=False)
    half = torch.nn.Linear(8, 2, bias=False)
    torch.nn.init.ones_(half.weight)
    half.weight.tensor_model_parallel = True  # type: ignore[assignment]
    for groups in (theirs, ours):
        assert calc_params_l2_norm(half, config, pg_collection=groups) == pytest.approx(32**0.5)
    rank = dist.get_rank()
    rows = torch.full((2, 2), float(rank))
    summed = [sum(ours.ranks("tp"))] * 2
    for groups in (theirs, ours):
        assert reduce_from_tensor_model_parallel_region(rows, groups).tolist() == [summed] * 2
        assert reduce_max_stat_across_model_parallel_group(rank, groups) == max(ours.ranks("mp"))
        assert all_to_all(rows, groups)[:, 0].tolist() == ours.ranks("ep")
        part = get_batch_on_this_cp_rank({"tokens": torch.arange(8)[None]}, groups)["tokens"]
        assert part.tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]][ours.rank("cp")]]
        assert check_param_hashes_across_dp_replicas(half, dp_group=groups, expert_dp_group=groups)
        assert get_tensor_model_parallel_group_if_none(groups) is ours.tp
    with use_process_groups(theirs) as default:
        assert default is not None
        assert default.ranks("dp_cp") == own.ranks("dp_cp")
        assert reduce_max_stat_across_model_parallel_group(rank, None) == max(ours.ranks("mp"))
    with pytest.raises(TypeError, match="ProcessGroupCollection as a process group: pass a group"):
        get_pg_size(theirs)
    few: Any = kind.ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
    with pytest.raises(ValueError, match="has no mp group: set it, or pass it"):
        reduce_max_stat_across_model_parallel_group(rank, few)
    state.destroy_model_parallel()


def test_groups_of_megatron_core() -> None:
    run_ranks(exchange_groups, 4, timeout_s=600)


def test_a_rank_outside_of_a_group_has_none() -> None:
    outside = SimpleNamespace(tp=None, embd=dist.GroupMember.NON_GROUP_MEMBER, hcp=[])
    assert repr(ProcessGroups.from_megatron(outside)) == "ProcessGroups(empty)"
    with pytest.raises(TypeError, match="expected a ProcessGroupCollection"):
        ProcessGroups.from_megatron(3)
