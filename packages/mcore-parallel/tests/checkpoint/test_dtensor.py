"""Shards of DTensors against what torch itself holds in each layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    CheckpointingException,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from rank_testing import run_ranks


def shard_of_dtensor(shape: tuple[int, ...], mesh_shape: tuple[int, ...], kinds: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    placements = [Replicate() if kind == "R" else Shard(int(kind)) for kind in kinds]
    tensor = distribute_tensor(whole, mesh, placements)
    assert isinstance(tensor, DTensor)
    shard = make_sharded_tensor_for_checkpoint(tensor, "w")
    assert make_tp_sharded_tensor_for_checkpoint(tensor, "w") == shard
    assert shard.data is tensor
    assert shard.is_torch_fsdp2_param is True  # type: ignore[attr-defined]
    start, size = shard.global_offset, shard.local_shape
    cut = whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
    assert torch.equal(cut, tensor.to_local())
    return start, size, shard.axis_fragmentations, shard.replica_id


ROWS_OF_TWO_RANKS = [
    ((5, 3), "0", [((0, 0), (3, 3), None, (0, 0, 0)), ((3, 0), (2, 3), None, (0, 0, 0))]),
    ((1, 3), "0", [((0, 0), (1, 3), None, (0, 0, 0)), ((1, 0), (0, 3), None, (0, 0, 0))]),
    ((4, 6), "1", [((0, 0), (4, 3), (1, 2), (0, 0, 0)), ((0, 3), (4, 3), (1, 2), (0, 0, 0))]),
    ((4,), "R", [((0,), (4,), (1,), (0, 0, 0)), ((0,), (4,), (1,), (0, 0, 1))]),
]
ROWS_OF_FOUR_RANKS = [
    ((8, 1), "00", [((2 * r, 0), (2, 1), (4, 1), (0, 0, 0)) for r in range(4)]),
    ((4, 4), "0R", [((2 * (r // 2), 0), (2, 4), (2, 1), (0, 0, r % 2)) for r in range(4)]),
    ((4, 4), "R1", [((0, 2 * (r % 2)), (4, 2), (1, 2), (0, 0, r // 2)) for r in range(4)]),
    ((2, 3), "RR", [((0, 0), (2, 3), (1, 1), (0, 0, r)) for r in range(4)]),
    ((3, 2), "00", [((min(r, 2 + r // 3), 0), (int(r < 3), 2), None, (0, 0, 0)) for r in range(4)]),
]


def shards_of_dtensors(mesh_shape: tuple[int, ...], cases: list[tuple[Any, str]]) -> list[Any]:
    return [shard_of_dtensor(shape, mesh_shape, kinds) for shape, kinds in cases]


@pytest.mark.parametrize(
    ("mesh_shape", "rows"), [((2,), ROWS_OF_TWO_RANKS), ((2, 2), ROWS_OF_FOUR_RANKS)]
)
def test_shard_of_a_dtensor_is_where_its_values_are(mesh_shape: tuple[int, ...], rows: Any) -> None:
    world = torch.Size(mesh_shape).numel()
    cases = [(shape, kinds) for shape, kinds, _ in rows]
    found = run_ranks(shards_of_dtensors, world, mesh_shape, cases)
    for case, (shape, kinds, expected) in enumerate(rows):
        assert [shards[case] for shards in found] == expected, (shape, kinds)


def fsdp2_over_tensor_parallel(rows: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    module = torch.nn.Linear(3, rows, bias=False)
    module.weight = torch.nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    weight = module.weight
    assert isinstance(weight, DTensor)
    shard = make_tp_sharded_tensor_for_checkpoint(
        weight, "w", tp_group=mesh["tp"], dp_cp_group=mesh["dp"]
    )
    start, size = shard.global_offset[0], shard.local_shape[0]
    assert torch.equal(whole[start : start + size], weight.to_local())
    return shard.global_shape, start, size, shard.axis_fragmentations, shard.replica_id


def fsdp2_of_plain_tensor_parallel_rows(local_rows: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "model"))
    tp_rank = mesh["model"].get_local_rank()
    whole = torch.arange(2 * local_rows * 3.0).reshape(2 * local_rows, 3)
    module = torch.nn.Linear(3, local_rows, bias=True)
    with torch.no_grad():
        module.weight.copy_(whole[tp_rank * local_rows : (tp_rank + 1) * local_rows])
    fully_shard(module, mesh=mesh["dp"])
    groups = {"tp_group": mesh["model"], "dp_cp_group": mesh["dp"]}
    shard = make_tp_sharded_tensor_for_checkpoint(
        module.weight, "w", prepend_offsets=((0, 1, 3),), **groups
    )
    bias = make_sharded_tensor_for_checkpoint(module.bias, "b", **groups)
    start, size = shard.global_offset[1], shard.local_shape[0]
    assert torch.equal(whole[start : start + size], module.weight.to_local())
    assert (shard.global_shape, shard.global_offset[0]) == ((3, 2 * local_rows, 3), 1)
    return start, size, shard.axis_fragmentations, shard.replica_id, bias.replica_id


def fsdp2_shards() -> tuple[Any, ...]:
    return (
        fsdp2_over_tensor_parallel(8),
        fsdp2_over_tensor_parallel(5),
        fsdp2_of_plain_tensor_parallel_rows(4),
        fsdp2_of_plain_tensor_parallel_rows(3),
    )


def test_fsdp2_over_tensor_parallelism_is_strided_or_composed() -> None:
    strided, uneven, composed, composed_uneven = zip(*run_ranks(fsdp2_shards, 4), strict=True)

    assert [start for _, start, _, _, _ in strided] == [0, 4, 2, 6]
    assert {shape for shape, *_ in strided} == {(8, 3)}
    assert {fragments for *_, fragments, _ in strided} == {(4, 1)}
    assert {replica for *_, replica in strided} == {(0, 0, 0)}

    rows = sorted(row for _, start, size, _, _ in uneven for row in range(start, start + size))
    assert rows == list(range(5))
    assert {fragments for *_, fragments, _ in uneven} == {None}

    assert [start for start, *_ in composed] == [0, 4, 2, 6]
    assert {fragments for _, _, fragments, _, _ in composed} == {(3, 4, 1)}
    assert {replica for *_, replica, _ in composed} == {(0, 0, 0)}
    assert [replica for *_, replica in composed] == [(0, 0, 0), (0, 1, 0)] * 2

    assert [(start, size) for start, size, *_ in composed_uneven] == [
        (0, 2),
        (3, 2),
        (2, 1),
        (5, 1),
    ]
    assert {fragments for _, _, fragments, _, _ in composed_uneven} == {None}


def refusals_of_dtensors() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    texts = []
    mesh = DeviceMesh("cpu", [0, 1])
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    scattered = DTensor.from_local(torch.ones(2), mesh, [_StridedShard(0, split_factor=2)])
    elsewhere = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [1]), [Shard(0)])
    for tensor in (partial, scattered, elsewhere):
        try:
            make_sharded_tensor_for_checkpoint(tensor, "w", dp_cp_group=dist.group.WORLD)
        except CheckpointingException as error:
            texts.append(str(error))
    return texts


def test_dtensors_whose_shard_is_not_a_box_are_refused() -> None:
    first, second = run_ranks(refusals_of_dtensors, 2)
    assert ["partial sums" in first[0], "scattered" in first[1], "outside" in first[2]] == [
        True
    ] * 3
    assert len(second) == 2
