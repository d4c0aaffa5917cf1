"""Collections, ours and a stand-in for megatron-core's, as arguments for a group."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mcore.parallel as package
from mcore.parallel import ProcessGroups, use_process_groups
from rank_testing import run_ranks


class ProcessGroupCollection:
    """Like megatron-core's: a group that was not set is no attribute."""

    def __init__(self, **groups: Any) -> None:
        vars(self).update(groups)


def results(group_of: Callable[[str], Any]) -> list[Any]:
    """Call every function that takes a group, with a group for each field."""
    rank = dist.get_rank()
    rows = torch.arange(8.0).view(4, 2) + 10 * rank
    tp, mp = group_of("tp"), group_of("mp")
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.constant_(model.bias, rank)
    expert = nn.Parameter(torch.zeros(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    batch = {name: torch.ones(1, 4) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    tokens = {"tokens": torch.arange(8)[None]}
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    config = SimpleNamespace(sequence_parallel=True)
    grads = [torch.ones(8, 1, 2)]
    package.drain_embedding_wgrad_compute(config, [rows.view(4, 1, 2)], grads, weight, tp)
    return [
        package.reduce_max_stat_across_model_parallel_group(float(rank), mp),
        package.logical_and_across_model_parallel_group(rank == 0, mp),
        package.reduce_max_memory_across_pp_group({"bytes": rank}, group_of("pp")),
        package.reduce_step_stats({"norm": float(rank)}, {"ok": rank == 1}, mp),
        package.copy_to_tensor_model_parallel_region(rows, tp).tolist(),
        package.reduce_from_tensor_model_parallel_region(rows, tp).tolist(),
        package.scatter_to_tensor_model_parallel_region(rows, tp).tolist(),
        package.gather_from_tensor_model_parallel_region(rows, tp).tolist(),
        package.scatter_to_sequence_parallel_region(rows, tp).tolist(),
        package.gather_from_sequence_parallel_region(rows, group=tp).tolist(),
        package.reduce_scatter_to_sequence_parallel_region(rows, tp).tolist(),
        package.all_to_all(rows, group_of("ep")).tolist(),
        package.vocab_parallel_cross_entropy(rows, torch.ones(4).long(), tp_group=tp).tolist(),
        package.checkpoint_activations(torch.sin, True, rows, tp_group=tp).tolist(),
        package.get_batch_on_this_cp_rank(tokens, group_of("cp"))["tokens"].tolist(),
        package.get_batch_on_this_tp_rank(batch, False, False, False, 0, tp, 1, rank, 1, 4, False)[
            "tokens"
        ].tolist(),
        package.check_param_hashes_across_dp_replicas(
            model, True, dp_group=group_of("dp"), expert_dp_group=group_of("expt_dp")
        ),
        package.param_is_not_tensor_parallel_duplicate(model.weight, tp),
        package.param_is_not_tensor_parallel_duplicate(expert, None, group_of("expt_tp")),
        package.get_tensor_model_parallel_group_if_none(tp) is dist.group.WORLD,
        package.get_tensor_model_parallel_group_if_none(group_of("expt_tp"), True)
        is dist.group.WORLD,
        weight.main_grad.tolist(),  # type: ignore[attr-defined]
    ]


def pass_collections() -> None:
    names = ("tp", "mp", "pp", "cp", "ep", "dp", "expt_dp", "expt_tp")
    world = dict.fromkeys(names, dist.group.WORLD)
    expected = results(world.__getitem__)
    assert expected[0] == 1.0
    assert expected[-1] == [[64.0, 72.0]] * 2  # the columns of both ranks' rows: 0 to 6 and 10 more
    for collection in (ProcessGroupCollection(**world), ProcessGroups(**world)):
        assert results(lambda _, given=collection: given) == expected
    with use_process_groups(ProcessGroupCollection(**world)) as pgs:  # type: ignore[arg-type]
        assert isinstance(pgs, ProcessGroups)
        assert pgs.tp is dist.group.WORLD
        highest = package.reduce_max_stat_across_model_parallel_group(float(dist.get_rank()), None)
        assert highest == 1.0
    unset: Any = ProcessGroupCollection(dp=dist.group.WORLD)
    with pytest.raises(ValueError, match="ProcessGroupCollection has no tp group: set it"):
        package.reduce_from_tensor_model_parallel_region(torch.ones(1), unset)
    alone = package.reduce_from_tensor_model_parallel_region(torch.ones(1), ProcessGroups())
    assert alone.item() == 1.0  # None is no parallelism
    for wrong in (unset, ProcessGroups()):
        with pytest.raises(TypeError, match="as a process group: pass a group of it"):
            package.get_pg_size(wrong)


def test_a_collection_is_as_good_as_its_group() -> None:
    run_ranks(pass_collections, 2)
