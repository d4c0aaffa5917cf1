"""Parameter marks: each row of the documented table, and who counts a duplicate."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mcore.parallel import (
    ProcessGroups,
    copy_tensor_model_parallel_attributes,
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
    use_process_groups,
)
from rank_testing import run_ranks

ROWS = [
    ({}, None),
    ({"_tensor_parallel_mode": "column"}, 0),
    ({"_tensor_parallel_mode": "row"}, 1),
    ({"_tensor_parallel_mode": "duplicated"}, None),
    (
        {"_tensor_parallel_mode": "duplicated", "tensor_model_parallel": True, "partition_dim": 1},
        None,
    ),
    (
        {"_tensor_parallel_mode": "column", "tensor_model_parallel": True, "partition_dim": 1},
        0,
    ),
    ({"tensor_model_parallel": True, "partition_dim": 1}, 1),
    ({"tensor_model_parallel": True, "partition_dim": -1}, None),
    ({"tensor_model_parallel": True}, None),
    ({"tensor_model_parallel": False, "partition_dim": 0}, None),
    (
        {"_tensor_parallel_mode": "diagonal", "tensor_model_parallel": True, "partition_dim": 1},
        1,
    ),
    ({"_tensor_parallel_mode": "diagonal"}, None),
    ({"_tensor_parallel_mode": None}, None),
    ({"tensor_model_parallel": True, "partition_dim": torch.tensor(1)}, 1),
    ({"tensor_model_parallel": True, "partition_dim": None}, None),
    # What Megatron-LM's FSDP documents and megatron-core 0.16.1 answers, but for the two marked.
    ({"_mcore_tp": True, "_tp_partition_dim": 1}, 1),
    ({"_mcore_tp": True, "_tp_partition_dim": None}, None),
    ({"_mcore_tp": True, "_tp_duplicated": False, "_tp_partition_dim": 0}, 0),
    ({"_mcore_tp": True, "tensor_model_parallel": True, "partition_dim": 1}, 1),
    ({"_mcore_tp": True, "partition_dim": 1}, 1),
    ({"_mcore_tp": True}, None),  # there an AttributeError
    ({"_mcore_tp": False, "_tp_partition_dim": 1}, None),
    ({"_tp_partition_dim": 1}, None),
    ({"_tp_duplicated": True}, None),
    ({"_mcore_tp": True, "_tp_duplicated": True, "_tp_partition_dim": 0}, None),  # there 0
    (
        {
            "_mcore_tp": True,
            "_tp_partition_dim": 0,
            "tensor_model_parallel": True,
            "partition_dim": 1,
        },
        0,
    ),
    ({"_mcore_tp": True, "_tp_partition_dim": 0, "_tensor_parallel_mode": "row"}, 1),
]


def parameter(**marks: object) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(4, 2))
    for name, value in marks.items():
        setattr(param, name, value)
    return param


@pytest.mark.parametrize(("marks", "dim"), ROWS, ids=str)
@pytest.mark.parametrize("make", [parameter, SimpleNamespace], ids=["parameter", "no tensor"])
def test_partition_dim(make, marks: dict[str, object], dim: int | None) -> None:
    param = make(**marks)
    found = get_mcore_tensor_parallel_partition_dim(param)
    assert found == dim
    assert found is None or type(found) is int
    assert is_mcore_tensor_model_parallel(param) is (dim is not None)
    assert is_mcore_tensor_parallel_duplicated(param) is (dim is None)


def test_contradicting_marks_are_logged_at_debug(caplog) -> None:
    param = parameter(_tp_duplicated=True, tensor_model_parallel=True, partition_dim=1)
    with caplog.at_level(logging.DEBUG, logger="mcore.parallel.tensor_parallel"):
        get_mcore_tensor_parallel_partition_dim(param)
        get_mcore_tensor_parallel_partition_dim(parameter(_tensor_parallel_mode="duplicated"))
    records = [one for one in caplog.records if one.name.startswith("mcore.")]
    assert [record.levelname for record in records] == ["DEBUG"]
    assert "dimension 1" in records[0].getMessage()


def test_marks_of_a_dtensor_then_of_its_original(fake_world) -> None:
    fake_world(0, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shard = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    shard._orig_param = parameter(tensor_model_parallel=True, partition_dim=1)
    assert get_mcore_tensor_parallel_partition_dim(shard) == 1
    shard._tensor_parallel_mode = "column"
    assert get_mcore_tensor_parallel_partition_dim(shard) == 0


def test_marks_are_set_once() -> None:
    param = parameter()
    set_tensor_model_parallel_attributes(param, True, 1, stride=2)
    marks = (param.tensor_model_parallel, param.partition_dim, param.partition_stride)
    assert marks == (True, 1, 2)
    with pytest.raises(ValueError, match="tensor_model_parallel is already True"):
        set_tensor_model_parallel_attributes(param, False, -1)
    assert param.tensor_model_parallel is True


@pytest.mark.parametrize(
    ("dim", "stride", "text"), [(-1, 1, "got -1"), (2, 1, "its 2 dimensions"), (0, 0, "stride")]
)
def test_impossible_marks_are_refused_and_leave_nothing(dim: int, stride: int, text: str) -> None:
    param = parameter()
    with pytest.raises(ValueError, match=text):
        set_tensor_model_parallel_attributes(param, True, dim, stride)
    assert not hasattr(param, "tensor_model_parallel")


def test_a_duplicated_parameter_may_have_any_dim() -> None:
    param = parameter()
    set_tensor_model_parallel_attributes(param, False, -1)
    assert get_mcore_tensor_parallel_partition_dim(param) is None


@pytest.mark.parametrize(("marks", "dim"), ROWS, ids=str)
def test_copied_marks_give_the_same_answer(marks: dict[str, object], dim: int | None) -> None:
    copy = torch.zeros(4, 2)
    copy_tensor_model_parallel_attributes(copy, parameter(**marks))
    assert get_mcore_tensor_parallel_partition_dim(copy) == dim
    assert {name: value for name, value in vars(copy).items() if name in marks} == marks


def who_counts() -> list[bool]:
    # ranks 0..3: dense tensor parallel over pairs, experts over [0, 2] and [1, 3]
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    expt_tp = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    split, dense = parameter(tensor_model_parallel=True), parameter(tensor_model_parallel=False)
    expert, marked = parameter(allreduce=False), parameter(_mcore_tp=True, _tp_partition_dim=0)
    given = [
        param_is_not_tensor_parallel_duplicate(param, tp, expt_tp)
        for param in (split, dense, parameter(), expert, parameter(allreduce=True), marked)
    ]
    with use_process_groups(ProcessGroups(tp=tp, expt_tp=expt_tp)):
        given += [param_is_not_tensor_parallel_duplicate(param) for param in (dense, expert)]
    return [*given, param_is_not_tensor_parallel_duplicate(dense)]


def test_one_rank_of_each_tp_group_counts_a_duplicate() -> None:
    # split, dense, unmarked, expert, marked dense, split by its other mark; by default: dense,
    # expert; no group at all
    assert run_ranks(who_counts, 4) == [
        [True, True, True, True, True, True, True, True, True],
        [True, False, False, True, False, True, False, True, True],
        [True, True, True, False, True, True, True, False, True],
        [True, False, False, False, False, True, False, False, True],
    ]


def test_without_distributed_every_parameter_counts() -> None:
    assert param_is_not_tensor_parallel_duplicate(parameter())
    assert param_is_not_tensor_parallel_duplicate(parameter(allreduce=False))


def test_counting_refuses_a_group_of_others(fake_world) -> None:
    fake_world(2, 4)
    with pytest.raises(ValueError, match="rank 2 is not a member"):
        param_is_not_tensor_parallel_duplicate(parameter(), dist.new_group([0, 1]))
