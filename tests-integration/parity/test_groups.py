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
from mcore.parallel import ProcessGroups, get_pg_size
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
    state.destroy_model_parallel()


def test_groups_of_megatron_core() -> None:
    run_ranks(exchange_groups, 4, timeout_s=120)


def test_a_rank_outside_of_a_group_has_none() -> None:
    outside = SimpleNamespace(tp=None, embd=dist.GroupMember.NON_GROUP_MEMBER, hcp=[])
    assert repr(ProcessGroups.from_megatron(outside)) == "ProcessGroups(empty)"
    with pytest.raises(TypeError, match="expected a ProcessGroupCollection"):
        ProcessGroups.from_megatron(3)
