import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mcore.tensor.dtensor import every_rank_has_elements


def chunks(tensor, count, dim):
    """What ``torch.chunk`` gives, with empty tensors for the chunks that it leaves out."""
    parts = list(torch.chunk(tensor, count, dim))
    return parts + [tensor.narrow(dim, 0, 0)] * (count - len(parts))


def cut(tensor, count, placement):
    """All shards of a tensor along one mesh dimension, cut from real data."""
    if isinstance(placement, _StridedShard):
        pieces = [
            chunks(piece, count, placement.dim)
            for piece in chunks(tensor, placement.split_factor, placement.dim)
        ]
        return [torch.cat(parts, placement.dim) for parts in zip(*pieces, strict=True)]
    if isinstance(placement, Shard):
        return chunks(tensor, count, placement.dim)
    return [tensor] * count


def local_tensors(tensor, mesh_shape, placements):
    """The local tensor of every rank of the mesh."""
    locals_ = [tensor]
    for count, placement in zip(mesh_shape, placements, strict=True):
        locals_ = [part for local in locals_ for part in cut(local, count, placement)]
    return locals_


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "expected"),
    [
        ((8,), (4,), [Shard(0)], True),
        ((5,), (4,), [Shard(0)], False),  # 2, 2, 1, 0
        ((3,), (4,), [Shard(0)], False),
        ((2,), (2, 2), [Shard(0), Shard(0)], False),
        ((3,), (2, 2), [Shard(0), Shard(0)], False),
        ((4,), (2, 2), [Shard(0), Shard(0)], True),
        ((9,), (2, 4), [Shard(0), Shard(0)], False),  # 5 becomes 2, 2, 1, 0
        ((8,), (2, 4), [Shard(0), Shard(0)], True),
        ((2, 3), (2, 3), [Shard(0), Shard(1)], True),
        ((2, 3), (2, 3), [Shard(1), Shard(0)], False),
        ((2, 3), (3,), [Shard(-1)], True),
        ((2, 3), (3,), [Shard(-2)], False),
        ((2,), (4,), [Replicate()], True),
        ((2,), (4,), [Partial()], True),
        ((), (4,), [Replicate()], True),
        ((0, 3), (2,), [Replicate()], False),
        ((4,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], True),
        ((3,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], False),
    ],
)
def test_known_cases(shape, mesh_shape, placements, expected):
    assert every_rank_has_elements(shape, mesh_shape, placements) is expected


@st.composite
def sharded_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = st.integers(-len(shape), len(shape) - 1)
    placement = st.one_of(
        st.builds(Shard, dims),
        st.just(Replicate()),
        st.just(Partial()),
        st.builds(
            lambda dim, factor: _StridedShard(dim, split_factor=factor),
            st.integers(0, len(shape) - 1),
            st.integers(1, 4),
        ),
    )
    return shape, mesh_shape, [draw(placement) for _ in mesh_shape]


@settings(deadline=None, max_examples=500)
@given(sharded_shapes())
def test_any_sharding_against_cutting_data(case):
    shape, mesh_shape, placements = case
    locals_ = local_tensors(torch.zeros(shape), mesh_shape, placements)
    assert every_rank_has_elements(*case) == all(local.numel() > 0 for local in locals_)


@settings(deadline=None, max_examples=200)
@given(sharded_shapes())
def test_cutting_data_is_what_dtensors_do(case):
    """The reference above against the shapes that torch itself computes for every rank."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, mesh_shape, placements = case
    normalised = [
        Shard(placement.dim % len(shape)) if type(placement) is Shard else placement
        for placement in placements
    ]
    coordinates = itertools.product(*map(range, mesh_shape))
    expected = [
        _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), normalised)[0]
        for coordinate in coordinates
    ]
    locals_ = local_tensors(torch.zeros(shape), mesh_shape, placements)
    assert [tuple(local.shape) for local in locals_] == expected


def test_large_meshes_take_no_time():
    assert every_rank_has_elements((2**20, 2**20), (256, 256), [Shard(0), Shard(1)])
    assert not every_rank_has_elements((2**16 + 1, 8), (256, 256), [Shard(0), Shard(0)])
