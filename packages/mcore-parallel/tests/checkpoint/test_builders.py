"""Builders against the offsets and replica numbers that each layout must have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    ShardedObject,
    ShardedTensor,
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensor_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    sharded_state_dict_default,
)
from mcore.parallel.process_groups import ProcessGroups, use_process_groups


class Place:
    """A stand-in for a group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


TP = Place(1, 2)


def describe(shard: ShardedTensor) -> tuple[object, ...]:
    return (
        shard.global_shape,
        shard.global_offset,
        shard.axis_fragmentations,
        shard.replica_id,
        shard.prepend_axis_num,
    )


def test_tensor_parallel_rank_1_of_2(fake_world: Any) -> None:
    fake_world(3, 6)
    local, groups = torch.zeros(4, 6), {"tp_group": TP, "dp_cp_group": Place(0, 3)}
    build = make_tp_sharded_tensor_for_checkpoint
    assert describe(build(local, "k", **groups)) == ((8, 6), (4, 0), (2, 1), (0, 0, 0), 0)
    stacked = build(local, "k", prepend_offsets=((0, 1, 3),), **groups)
    assert describe(stacked) == ((3, 8, 6), (1, 4, 0), (3, 2, 1), (0, 0, 0), 1)
    assert stacked.local_chunk_offset_in_global() == (1, 1, 0)
    columns = ((4, 12), (0, 6), (1, 2), (0, 0, 0), 0)
    assert describe(build(local, "k", 1, **groups)) == columns
    assert describe(build(local, "k", -1, **groups)) == columns
    assert build(local, "k", tp_group=TP, dp_cp_group=Place(2, 3)).replica_id == (0, 0, 2)
    assert build(local, "k", replica_id=(1, 2, 3), tp_group=TP, dp_cp_group=TP).replica_id == (
        (1, 2, 3)
    )


def test_replicated_tensor_counts_both_groups(fake_world: Any) -> None:
    fake_world(5, 6)
    groups = {"tp_group": TP, "dp_cp_group": Place(2, 3)}
    shard = make_sharded_tensor_for_checkpoint(torch.zeros(4), "k", **groups)
    assert describe(shard) == ((4,), (0,), (1,), (0, 1, 2), 0)
    stacked = make_sharded_tensor_for_checkpoint(torch.zeros(4), "k", ((0, 1, 4),), **groups)
    assert describe(stacked) == ((4, 4), (1, 0), (4, 1), (0, 1, 2), 1)


def test_object_is_one_of_an_array(fake_world: Any) -> None:
    fake_world(5, 6)
    groups = {"tp_group": TP, "dp_cp_group": Place(2, 3)}
    single = make_sharded_object_for_checkpoint("x", "k", **groups)
    assert (single.unique_key, single.replica_id) == ("k/shard_0_1", (0, 1, 2))
    one = make_sharded_object_for_checkpoint("x", "k", ((1, 2, 5), (0, 1, 3)), **groups)
    assert (one.global_shape, one.global_offset) == ((3, 5), (1, 2))
    for offsets in (((1, 0, 2),), ((0, 0, 2), (0, 1, 2)), ((0, 0, 1), (2, 0, 1))):
        with pytest.raises(ValueError, match="axes 0 to"):
            make_sharded_object_for_checkpoint("x", "k", offsets, **groups)


def test_further_fields_are_passed_on_and_unknown_ones_refused() -> None:
    padded = make_tp_sharded_tensor_for_checkpoint(torch.zeros(2), "k", allow_shape_mismatch=True)
    assert padded.allow_shape_mismatch
    for build in (make_tp_sharded_tensor_for_checkpoint, make_sharded_tensor_for_checkpoint):
        with pytest.raises(TypeError, match=r"unknown keywords allow_shape, group"):
            build(torch.zeros(2), "k", allow_shape=True, group=None)
    with pytest.raises(TypeError, match="unknown keywords allow_shape_mismatch"):
        make_sharded_object_for_checkpoint(1, "k", allow_shape_mismatch=True)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_axis_outside_the_tensor_is_refused(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(ValueError, match="tp_axis"):
        make_tp_sharded_tensor_for_checkpoint(torch.zeros(shape), "k", axis)


def test_without_distributed_every_group_has_one_rank() -> None:
    shard = make_tp_sharded_tensor_for_checkpoint(torch.zeros(2), "k", tp_group=TP)
    assert describe(shard) == ((2,), (0,), (1,), (0, 0, 0), 0)


def test_each_group_falls_back_on_its_own(fake_world: Any) -> None:
    fake_world(5, 8)
    local = torch.zeros(4)
    with pytest.raises(RuntimeError, match="dp_cp_group is not given"):
        make_sharded_tensor_for_checkpoint(local, "k", tp_group=TP)
    with pytest.raises(RuntimeError, match="tp_group is not given"):
        make_tp_sharded_tensor_for_checkpoint(local, "k", dp_cp_group=Place(0, 2))
    with pytest.raises(RuntimeError, match="tp_group is not given"):
        make_sharded_object_for_checkpoint(1, "k")
    known = make_tp_sharded_tensor_for_checkpoint(local, "k", tp_group=TP, replica_id=7)
    assert known.replica_id == 7
    with use_process_groups(ProcessGroups.from_sizes(tp=4)):
        assert make_tp_sharded_tensor_for_checkpoint(local, "k").replica_id == (0, 0, 1)
        mixed = make_sharded_tensor_for_checkpoint(local, "k", tp_group=Place(0, 2))
        assert mixed.replica_id == (0, 0, 1)  # the default would give tp rank 1
        mixed = make_sharded_tensor_for_checkpoint(local, "k", dp_cp_group=Place(3, 4))
        assert mixed.replica_id == (0, 1, 3)


def test_a_group_that_fills_the_world_leaves_one_rank_for_the_other(fake_world: Any) -> None:
    fake_world(5, 8)
    world = dist.group.WORLD
    local = torch.zeros(4)
    build = make_sharded_tensor_for_checkpoint
    assert build(local, "k", tp_group=world).replica_id == (0, 5, 0)
    assert build(local, "k", dp_cp_group=world).replica_id == (0, 0, 5)
    with use_process_groups(ProcessGroups.from_sizes(tp=2, pp=4, groups=("tp", "pp"))):
        assert build(local, "k").replica_id == (0, 1, 0)


def test_state_dict_becomes_objects_shards_and_replicas(fake_world: Any) -> None:
    fake_world(3, 6)
    state = {
        "weight": torch.zeros(4, 6),
        "bias": torch.zeros(4),
        "norm._extra_state": torch.zeros(9),
    }
    sharded = make_sharded_tensors_for_checkpoint(
        state,
        "layer.",
        {"weight": 1},
        ((0, 1, 4),),
        tp_group=TP,
        dp_cp_group=Place(0, 3),
    )
    assert list(sharded) == ["layer.weight", "layer.bias", "layer.norm._extra_state"]
    assert all(key == value.key for key, value in sharded.items())
    assert sharded["layer.weight"].data is state["weight"]
    assert describe(sharded["layer.weight"]) == ((4, 4, 12), (1, 0, 6), (4, 1, 2), (0, 0, 0), 1)
    assert describe(sharded["layer.bias"]) == ((4, 4), (1, 0), (4, 1), (0, 1, 0), 1)
    extra = sharded["layer.norm._extra_state"]
    assert isinstance(extra, ShardedObject)
    assert extra.unique_key == "layer.norm._extra_state/shard_1_4"
    with pytest.raises(TypeError, match=r"'layer\.scale': expected a tensor, got float"):
        make_sharded_tensors_for_checkpoint({"scale": 1.0}, "layer.")


def test_plain_module_is_replicated_with_its_live_parameters() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    sharded = sharded_state_dict_default(module, "bn.", ((0, 2, 3),))
    assert set(sharded) == {
        "bn.weight",
        "bn.bias",
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
    }
    assert sharded["bn.weight"].data is module.weight
    assert sharded["bn.num_batches_tracked"].global_shape == (3,)


class OwnMethod(torch.nn.Module):
    def sharded_state_dict(self, **given: object) -> dict[str, object]:
        return given


def test_module_with_its_own_method_is_asked() -> None:
    metadata = {"dp_cp_group": None}
    given = sharded_state_dict_default(OwnMethod(), "p.", ((0, 0, 1),), metadata, tp_group=TP)
    assert given == {
        "prefix": "p.",
        "sharded_offsets": ((0, 0, 1),),
        "metadata": {"dp_cp_group": None, "tp_group": TP},
    }
    assert metadata == {"dp_cp_group": None}


def test_groups_in_metadata_serve_plain_modules(fake_world: Any) -> None:
    fake_world(5, 6)
    metadata = {"tp_group": TP, "dp_cp_group": Place(2, 3)}
    sharded = sharded_state_dict_default(torch.nn.LayerNorm(2), "n.", metadata=metadata)
    assert sharded["n.weight"].replica_id == (0, 1, 2)


def test_metadata_is_copied_and_completed(fake_world: Any) -> None:
    fake_world(0, 4)
    given = {"a": 1}
    assert ensure_metadata_has_dp_cp_group(given) == {"a": 1, "dp_cp_group": None}
    assert given == {"a": 1}
    pgs = ProcessGroups.from_sizes(tp=2)
    with use_process_groups(pgs):
        assert ensure_metadata_has_dp_cp_group(None)["dp_cp_group"] is pgs.dp_cp
        assert ensure_metadata_has_dp_cp_group({"dp_cp_group": TP})["dp_cp_group"] is TP
    with pytest.raises(TypeError, match="metadata must be a dict"):
        ensure_metadata_has_dp_cp_group([1])  # type: ignore[arg-type]


def test_meta_tensors_are_described_without_data() -> None:
    module = torch.nn.Linear(2, 3, device="meta")
    assert sharded_state_dict_default(module)["weight"].global_shape == (3, 2)


class Inner(torch.nn.Linear):
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        return {f"{prefix}{name}": parameter for name, parameter in self.named_parameters()}


def wrap_like_megatron(inner: torch.nn.Module, name: str, base: type) -> torch.nn.Module:
    """Wrap as a class of Megatron-LM that inherits a method for the names of its children."""
    wrapper: Any = type(name, (base,), {"__module__": "megatron.core.distributed"})()
    wrapper.module = inner
    return wrapper  # type: ignore[no-any-return]


class DescribesChildren(torch.nn.Module):
    def sharded_state_dict(self, prefix: str = "", **given: Any) -> dict[str, Any]:
        children = self._modules.items()
        return {
            key: value
            for name, child in children
            for key, value in child.sharded_state_dict(f"{prefix}{name}.").items()  # type: ignore[union-attr, operator]
        }


@pytest.mark.parametrize("base", [torch.nn.Module, DescribesChildren])
@pytest.mark.parametrize("inner", [torch.nn.Linear, Inner])
def test_wrappers_of_megatron_have_no_part_in_the_keys(inner: type, base: type) -> None:
    half = wrap_like_megatron(inner(2, 1), "Float16Module", base)
    model = wrap_like_megatron(half, "DistributedDataParallel", base)
    assert sorted(sharded_state_dict_default(model, "m.")) == ["m.bias", "m.weight"]
    foreign = wrap_like_megatron(model, "Encoder", torch.nn.Module)
    assert all(key.startswith("module.") for key in sharded_state_dict_default(foreign))


def test_parameters_that_are_gathered_late_are_ready_for_a_plain_module() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    weight: Any = module.weight
    weight._ensure_param_ready_callback = lambda: setattr(weight, "data", torch.full((1, 1), 3.0))
    assert sharded_state_dict_default(module)["weight"].data.item() == 3.0
