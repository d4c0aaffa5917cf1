"""Sharded tensors and objects against offsets and shapes that were worked out by hand."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from mcore.parallel.checkpoint import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
    load_sharded_state_dict,
    save_sharded_state_dict,
)


def uneven(**changes: object) -> ShardedTensor:
    fields: dict[str, object] = {
        "key": "w",
        "data": None,
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (5, 3),
        "global_offset": (3, 0),
        "axis_fragmentations": None,
    }
    return ShardedTensor(**(fields | changes))  # type: ignore[arg-type]


def test_offsets_of_a_row_shard() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), (0, 1, 2))
    assert shard.global_shape == (8, 6)
    assert shard.global_offset == (4, 0)
    assert shard.axis_fragmentations == (2, 1)
    assert shard.local_shape == (4, 6)
    assert shard.has_regular_grid
    assert shard.local_chunk_offset_in_global() == (1, 0)


def test_offsets_with_a_prepended_axis() -> None:
    shard = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(4, 6), (0, 1, 3), (1, 1, 2), prepend_axis_num=1
    )
    assert shard.global_shape == (3, 8, 6)
    assert shard.global_offset == (1, 4, 0)
    assert shard.axis_fragmentations == (3, 2, 1)
    assert shard.local_shape == (4, 6)
    assert shard.local_chunk_offset_in_global() == (1, 1, 0)


def test_data_is_the_given_tensor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert ShardedTensor.from_rank_offsets("w", parameter).data is parameter


@settings(deadline=None)
@given(
    local=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    prepended=st.integers(0, 2),
)
def test_all_shards_of_a_grid_tile_the_whole(
    local: list[int], counts: list[int], prepended: int
) -> None:
    ndim = prepended + len(local)
    cuts = counts[:ndim]
    whole: torch.Tensor | None = None
    for number in range(math.prod(cuts)):
        places = np.unravel_index(number, cuts)
        offsets = [(a, int(p), c) for a, (p, c) in enumerate(zip(places, cuts, strict=True))]
        shard = ShardedTensor.from_rank_offsets(
            "w", torch.zeros(local), *offsets, prepend_axis_num=prepended
        )
        whole = torch.zeros(shard.global_shape) if whole is None else whole
        axes = zip(shard.global_offset, shard.shard_shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in axes)] += 1
        assert shard.local_chunk_offset_in_global()[: len(cuts)] == places
    assert whole is not None
    assert torch.equal(whole, torch.ones_like(whole))


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([(0, 0, 2), (0, 1, 2)], "axis 0 has two offsets"),
        ([(2, 0, 2)], "axis 2"),
        ([(-1, 0, 2)], "axis -1"),
        ([(0, 2, 2)], "0 <= index < count"),
        ([(0, -1, 2)], "0 <= index < count"),
        ([(0, 0, 0)], "count >= 1"),
        ([(0, 1)], "axis, index, count"),
    ],
)
def test_wrong_rank_offsets_are_refused(offsets: list[tuple[int, ...]], text: str) -> None:
    with pytest.raises(CheckpointingException, match=text) as caught:
        ShardedTensor.from_rank_offsets("layer.w", torch.zeros(4, 6), *offsets)
    assert "'layer.w'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": torch.zeros(2, 3, dtype=torch.int32)}, "int32"),
        ({"data": torch.zeros(3, 2)}, r"\(3, 2\)"),
        ({"global_shape": (5, 3, 1)}, "needs 2 entries"),
        ({"prepend_axis_num": 1}, "needs 3 entries"),
        ({"global_offset": (4, 0)}, "outside the global size 5"),
        ({"global_offset": (-1, 0)}, "outside"),
        ({"axis_fragmentations": (2, 1)}, "not a regular grid"),
        ({"axis_fragmentations": (1,)}, "one entry per axis"),
        ({"flattened_range": slice(0, 2)}, "flattened_range"),
        (
            {"global_shape": (4, 3), "global_offset": (1, 0), "axis_fragmentations": (2, 1)},
            "not a regular grid",
        ),
    ],
)
def test_contradicting_fields_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointingException, match=text):
        uneven(**changes)


def test_numbers_of_numpy_and_torch_become_plain_tuples() -> None:
    shard = uneven(global_shape=torch.Size([5, 3]), global_offset=list(np.array([3, 0])))
    assert shard.global_offset == (3, 0)
    assert {type(number) for number in shard.global_offset + shard.global_shape} == {int}
    assert type(shard.global_shape) is tuple
    one = ShardedObject("k", None, tuple(np.array([2])), tuple(np.array([1])))
    assert type(one.global_shape[0]) is int


def test_uneven_shards_have_no_place_in_a_grid() -> None:
    shard = uneven()
    assert not shard.has_regular_grid
    with pytest.raises(CheckpointingException, match="axis_fragmentations is None"):
        shard.local_chunk_offset_in_global()


def test_empty_shard_of_a_regular_grid() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(0, 6), (0, 1, 2))
    assert shard.global_shape == (0, 6)
    assert shard.local_chunk_offset_in_global() == (0, 0)


def test_description_without_data_can_be_allocated_again() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 1, 2), replica_id=(0, 0, 1))
    bare = shard.without_data()
    assert bare.data is None
    assert bare == shard
    bare.init_data("cpu", torch.zeros)
    assert bare.data is not None
    assert torch.equal(bare.data, torch.zeros(2, 3))
    kept = bare.data
    bare.init_data("cpu")
    assert bare.data is kept


def test_init_data_refuses_a_function_that_makes_another_shape() -> None:
    bare = ShardedTensor.from_rank_offsets("w", torch.ones(2)).without_data()
    with pytest.raises(CheckpointingException, match="local_shape"):
        bare.init_data("cpu", lambda shape, dtype, device: torch.zeros(3, dtype=dtype))


def test_narrow_scales_global_shape_and_offset() -> None:
    data = torch.arange(24.0).reshape(4, 6)
    shard = ShardedTensor.from_rank_offsets("qkv", data, (0, 2, 3), (1, 1, 2), prepend_axis_num=1)
    [half] = shard.narrow(0, 1, 2)
    assert half.global_shape == (3, 4, 6)
    assert half.global_offset == (2, 2, 0)
    assert half.local_shape == (2, 6)
    assert half.axis_fragmentations == (3, 2, 1)
    assert half.data is not None
    assert torch.equal(half.data, data[1:3])
    assert half.data.data_ptr() == data[1].data_ptr()
    [same] = shard.narrow(-1, 0, 6)
    assert same == shard


@pytest.mark.parametrize(("dim", "start", "length"), [(2, 0, 1), (0, 1, 2), (0, -1, 1), (0, 0, 3)])
def test_narrow_outside_the_shard_is_refused(dim: int, start: int, length: int) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))
    with pytest.raises(CheckpointingException, match="cannot narrow"):
        shard.narrow(dim, start, length)


def test_narrow_that_does_not_divide_is_refused() -> None:
    with pytest.raises(CheckpointingException, match="not a whole number"):
        uneven().narrow(0, 0, 1)


@pytest.mark.parametrize(
    ("replica_id", "main"),
    [
        (0, True),
        (1, False),
        ((0, 0, 0), True),
        ((0, 0, 1), False),
        (np.int64(0), True),
        (np.int32(3), False),
        ((np.int64(0), 0), True),
        ((), True),
    ],
)
def test_main_replica_is_the_one_of_zeros(replica_id: object, main: bool) -> None:
    assert is_main_replica(replica_id) is main  # type: ignore[arg-type]


def test_unique_key_of_an_object() -> None:
    assert ShardedObject("k", None, (1,), (0,)).unique_key == "k/shard_0_1"
    assert ShardedObject("a/b", None, (4, 12), (3, 10)).unique_key == "a/b/shard_3.10_4.12"


@settings(deadline=None)
@given(
    key=st.text(min_size=1),
    cells=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=3),
)
def test_unique_key_is_read_back(key: str, cells: list[tuple[int, int]]) -> None:
    shape = tuple(offset + size for offset, size in cells)
    written = ShardedObject(key, "data", shape, tuple(offset for offset, _ in cells))
    read = ShardedObject.empty_from_unique_key(written.unique_key, replica_id=(0, 1))
    assert read == ShardedObject(key, None, shape, written.global_offset, (0, 1))


def test_key_with_slashes_and_the_word_shard_is_read_back() -> None:
    tricky = ShardedObject("a/shard_0_1/b", None, (2,), (1,))
    assert ShardedObject.empty_from_unique_key(tricky.unique_key).key == "a/shard_0_1/b"


@pytest.mark.parametrize("text", ["", "key", "key/shard_0", "key/shard_x_1", "key/shard_0_1/rest"])
def test_what_is_no_unique_key_is_refused(text: str) -> None:
    with pytest.raises(CheckpointingException, match="unique key"):
        ShardedObject.empty_from_unique_key(text)


@pytest.mark.parametrize(
    ("shape", "offset"), [((2,), (2,)), ((2,), (-1,)), ((2, 2), (0,)), ((), ())]
)
def test_object_outside_its_array_is_refused(
    shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    with pytest.raises(CheckpointingException, match="not an index"):
        ShardedObject("k", None, shape, offset)


def test_local_object_is_handed_back() -> None:
    value = object()
    assert LocalNonpersistentObject(value).unwrap() is value


@pytest.mark.parametrize(
    "entry",
    [
        ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2)),
        ShardedObject("state", [1], (1,), (0,)),
        LocalNonpersistentObject([1]),
    ],
    ids=["tensor", "object", "local"],
)
def test_entries_are_copied_but_not_pickled(entry: Any, tmp_path: Path) -> None:
    for copied in (copy.copy(entry), copy.deepcopy(entry)):
        assert type(copied) is type(entry)
        assert vars(copied).keys() == vars(entry).keys()
    held = vars(entry).get("data", vars(entry).get("obj"))
    deep = vars(copy.deepcopy({"a": entry, "b": entry})["a"])
    assert deep.get("data", deep.get("obj")) is not held
    remedy = "to_megatron_sharded_state_dict"
    with pytest.raises(pickle.PicklingError, match=remedy):
        pickle.dumps({"model": entry})
    with pytest.raises(pickle.PicklingError, match=remedy):
        torch.save({"model": entry}, tmp_path / "file")
    with pytest.raises(CheckpointException) as failed:
        dcp.save({"model": entry}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert remedy in str(failed.value)


def test_descriptions_without_data_are_pickled() -> None:
    entry = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2)).without_data()
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_entries_of_megatron_are_refused_with_the_conversion(tmp_path: Path) -> None:
    theirs = type("ShardedTensor", (), {"__module__": "megatron.core.dist_checkpointing.mapping"})
    save_sharded_state_dict({"model": 1}, tmp_path / "a")
    for state in ({"model": {"w": theirs()}}, {"model": [theirs()]}):
        with pytest.raises(CheckpointingException, match="from_megatron_sharded_state_dict"):
            save_sharded_state_dict(state, tmp_path / "b", weights_only=False)
        with pytest.raises(CheckpointingException, match="from_megatron_sharded_state_dict"):
            load_sharded_state_dict(state, tmp_path / "a")
    assert not (tmp_path / "b").exists()
