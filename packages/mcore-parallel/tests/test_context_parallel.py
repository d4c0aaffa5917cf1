"""Balanced slices of a batch over a context-parallel group."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore.parallel import (
    ProcessGroups,
    cp_unzigzag,
    cp_zigzag_index,
    gather_from_sequence_parallel_region,
    get_batch_on_this_cp_rank,
    use_process_groups,
)
from rank_testing import run_ranks

# Positions of one sequence.


@pytest.mark.parametrize(
    ("cp_size", "positions"),
    [
        (2, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        (4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        (1, [list(range(16))]),
    ],
)
def test_positions_of_sixteen_tokens(cp_size: int, positions: list[list[int]]) -> None:
    assert [cp_zigzag_index(16, cp_size, rank).tolist() for rank in range(cp_size)] == positions


@pytest.mark.parametrize(
    ("cu_seqlens", "positions"),
    [
        ([0, 8, 16], [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
        ([0, 4, 16], [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]),
    ],
)
@pytest.mark.parametrize("as_given", [list, torch.tensor, lambda v: torch.tensor([v]).int()])
def test_positions_of_packed_documents(
    cu_seqlens: list[int], positions: list[list[int]], as_given: Any
) -> None:
    indices = [cp_zigzag_index(16, 2, rank, cu_seqlens=as_given(cu_seqlens)) for rank in (0, 1)]
    assert [index.tolist() for index in indices] == positions
    assert {index.dtype for index in indices} == {torch.int64}


CP_SIZES = st.integers(1, 9)


@st.composite
def packed_sequences(draw: st.DrawFn) -> tuple[int, list[int]]:
    cp_size = draw(CP_SIZES)
    chunks = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    lengths = torch.tensor([0] + [2 * cp_size * chunk for chunk in chunks])
    return cp_size, lengths.cumsum(0).tolist()


@settings(deadline=None)
@given(cp_size=CP_SIZES, chunk=st.integers(0, 40))
def test_every_position_is_on_one_rank_and_causal_work_is_equal(cp_size: int, chunk: int) -> None:
    seq_len = 2 * cp_size * chunk
    indices = [cp_zigzag_index(seq_len, cp_size, rank) for rank in range(cp_size)]
    assert sorted(torch.cat(indices).tolist()) == list(range(seq_len))
    assert len({int((index + 1).sum()) for index in indices}) == 1


@settings(deadline=None)
@given(packed_sequences())
def test_every_document_is_shared_and_its_causal_work_is_equal(case: tuple[int, list[int]]) -> None:
    cp_size, cu_seqlens = case
    indices = [
        cp_zigzag_index(cu_seqlens[-1], cp_size, rank, cu_seqlens=cu_seqlens)
        for rank in range(cp_size)
    ]
    assert sorted(torch.cat(indices).tolist()) == list(range(cu_seqlens[-1]))
    for start, end in itertools.pairwise(cu_seqlens):
        own = [index[(index >= start) & (index < end)] for index in indices]
        assert {len(part) for part in own} == {(end - start) // cp_size}
        assert len({int((part - start + 1).sum()) for part in own}) == 1


@settings(deadline=None)
@given(packed_sequences())
def test_a_packed_rank_holds_the_zigzag_of_each_document_in_turn(
    case: tuple[int, list[int]],
) -> None:
    cp_size, cu_seqlens = case
    for rank in range(cp_size):
        expected = [
            start + position
            for start, end in itertools.pairwise(cu_seqlens)
            for position in cp_zigzag_index(end - start, cp_size, rank).tolist()
        ]
        index = cp_zigzag_index(cu_seqlens[-1], cp_size, rank, cu_seqlens=cu_seqlens)
        assert index.tolist() == expected


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seq_len", [64, 512, 4096])
def test_positions_equal_the_two_chunks_of_the_sequence(cp_size: int, seq_len: int) -> None:
    chunks = torch.arange(seq_len).chunk(2 * cp_size)
    for rank in range(cp_size):
        expected = torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank]))
        assert torch.equal(cp_zigzag_index(seq_len, cp_size, rank), expected)


def test_thousands_of_ranks_cover_the_sequence_once() -> None:
    cp_size = 2048
    indices = [cp_zigzag_index(2 * cp_size, cp_size, rank) for rank in range(cp_size)]
    assert torch.equal(torch.cat(indices).sort().values, torch.arange(2 * cp_size))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((15, 2, 0), {}, r"length 15, not divisible by 4 "),
        ((16, 2, 2), {}, "cp_rank is 2, expected 0 to 1 with cp_size 2"),
        ((16, 2, -1), {}, "cp_rank is -1"),
        ((16, 0, 0), {}, "cp_size is 0"),
        ((-4, 1, 0), {}, "seq_len is -4"),
        ((16, 2, 0), {"cu_seqlens": [0, 6, 16]}, r"document 0 \[0, 6\) has length 6"),
        ((6, 2, 0), {"cu_seqlens": [0, 6]}, "1 of 1 document cannot"),
        (
            (16, 2, 0),
            {"cu_seqlens": [0, 4, 8, 14, 16]},
            r"document 2 \[8, 14\).*2 of 4 documents cannot",
        ),
        ((16, 2, 0), {"cu_seqlens": [4, 16]}, "must start at 0"),
        ((16, 2, 0), {"cu_seqlens": []}, "must start at 0"),
        ((16, 2, 0), {"cu_seqlens": [0, 12, 8, 16]}, "must not decrease"),
        ((16, 2, 0), {"cu_seqlens": [0, 8]}, "ends at 8, expected 16"),
        ((16, 1, 0), {"cu_seqlens": [0, 8]}, "ends at 8, expected 16"),
        ((16, 2, 0), {"cu_seqlens": [[0, 8, 16], [0, 4, 16]]}, "2 rows.*flatten the micro-batch"),
        ((16, 2, 0), {"cu_seqlens": torch.tensor(16)}, r"\[n\] or \[1, n\]"),
        ((16, 2, 0), {"cu_seqlens": torch.tensor([0.0, 16.0])}, "integers"),
        ((16, 2, 0), {"cu_seqlens": torch.tensor([0j, 16])}, "integers"),
    ],
)
def test_bad_positions_are_refused(
    arguments: tuple[int, int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cp_zigzag_index(*arguments, **options)


# Shards back to the whole.


@settings(deadline=None)
@given(
    cp_size=CP_SIZES,
    chunk=st.integers(0, 5),
    dim=st.integers(-3, 2),
    other=st.integers(0, 3),
)
def test_unzigzag_inverts_the_split(cp_size: int, chunk: int, dim: int, other: int) -> None:
    shape = [other] * 3
    shape[dim] = 2 * cp_size * chunk
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [
        whole.index_select(dim, cp_zigzag_index(shape[dim], cp_size, rank))
        for rank in range(cp_size)
    ]
    assert torch.equal(cp_unzigzag(shards, dim), whole)


def test_unzigzag_passes_gradients_to_the_shard_that_holds_the_position() -> None:
    shards = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    (cp_unzigzag(shards, 0) * torch.arange(8.0)).sum().backward()
    assert [shard.grad.tolist() for shard in shards] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@settings(deadline=None)
@given(packed_sequences(), st.integers(-2, 1))
def test_unzigzag_inverts_the_split_of_packed_documents(
    case: tuple[int, list[int]], dim: int
) -> None:
    cp_size, cu_seqlens = case
    shape = [3, 3]
    shape[dim] = cu_seqlens[-1]
    whole = torch.arange(3 * cu_seqlens[-1]).view(shape)
    shards = [
        whole.index_select(dim, cp_zigzag_index(shape[dim], cp_size, rank, cu_seqlens=cu_seqlens))
        for rank in range(cp_size)
    ]
    assert torch.equal(cp_unzigzag(shards, dim, cu_seqlens=cu_seqlens), whole)


def test_packed_unzigzag_passes_gradients_to_the_shard_that_holds_the_position() -> None:
    shards = [torch.zeros(8, requires_grad=True) for _ in range(2)]
    (
        cp_unzigzag(shards, 0, cu_seqlens=torch.tensor([[0, 4, 16]])) * torch.arange(16.0)
    ).sum().backward()
    assert [shard.grad.tolist() for shard in shards] == [
        [0, 3, 4, 5, 6, 13, 14, 15],
        [1, 2, 7, 8, 9, 10, 11, 12],
    ]


@pytest.mark.parametrize("size", [2, torch.tensor([2])])
def test_hybrid_shards_are_those_of_the_ranks_that_share_the_batch(size: Any) -> None:
    shards = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    assert cp_unzigzag(shards, 0, local_cp_size=size).tolist() == [*range(8)]
    with pytest.raises(ValueError, match=r"4 shards.*local_cp_size of 2.*hybrid_cp_group"):
        cp_unzigzag(shards * 2, 0, local_cp_size=size)
    assert cp_unzigzag(shards[:1], 0, local_cp_size=1) is shards[0]


@pytest.mark.parametrize(
    ("shards", "cu_seqlens", "message"),
    [
        (2, [0, 6, 16], r"document 0 \[0, 6\)"),
        (2, [0, 8], "ends at 8, expected 16, the length of 2 shards"),
        (1, [0, 4], "ends at 4, expected 8, the length of 1 shard$"),
    ],
)
def test_borders_that_do_not_fit_the_shards_are_refused(
    shards: int, cu_seqlens: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cp_unzigzag([torch.zeros(8)] * shards, 0, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("shards", "dim", "message"),
    [
        ([], 0, "no shards"),
        ([torch.zeros(4), torch.zeros(2)], 0, r"one shape, got \[\(4,\), \(2,\)\]"),
        ([torch.zeros(3), torch.zeros(3)], 0, "odd length 3"),
        ([torch.zeros(4), torch.zeros(4)], 1, "no dim 1"),
    ],
)
def test_shards_that_are_no_split_are_refused(shards: list[Tensor], dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cp_unzigzag(shards, dim)


# Batches, with one process.


def test_without_torch_distributed_the_batch_is_copied_shallowly() -> None:
    batch = {"tokens": torch.zeros(2, 15), "labels": None, "cu_seqlens": torch.tensor([0, 15])}
    for options in ({}, {"use_per_sequence_balancing": True}):
        part = get_batch_on_this_cp_rank(batch, **options)
        assert part is not batch
        assert list(part) == list(batch)
        assert all(part[name] is batch[name] for name in batch)


def test_a_bool_in_the_place_of_the_group_names_the_keyword() -> None:
    with pytest.raises(TypeError, match="is_hybrid_cp=True"):
        get_batch_on_this_cp_rank({}, True)  # type: ignore[arg-type]


def hybrid_batch(**changes: Any) -> dict[str, Any]:
    batch = {
        "tokens": torch.arange(16).view(1, 16),
        "attention_mask": torch.arange(256).view(1, 1, 16, 16),
        "labels": None,
        "cu_seqlens": torch.tensor([0, 16]),
        "local_cp_size": 2,
    }
    return batch | changes


@pytest.mark.parametrize(
    "value", [None, 0, -2, torch.tensor([1, 2]), torch.tensor(1.5), "two", torch.tensor([])]
)
def test_a_hybrid_batch_without_a_usable_size_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="local_cp_size"):
        get_batch_on_this_cp_rank(hybrid_batch(local_cp_size=value), is_hybrid_cp=True)


def test_a_hybrid_batch_needs_a_way_to_its_group() -> None:
    with pytest.raises(ValueError, match="hybrid_cp_group_func"):
        get_batch_on_this_cp_rank(hybrid_batch(), is_hybrid_cp=True)


@pytest.mark.parametrize("size", [1, torch.tensor(1), torch.tensor([1], dtype=torch.int32)])
def test_a_hybrid_batch_of_one_rank_stays_as_it_is(size: Any) -> None:
    batch = hybrid_batch(local_cp_size=size)
    part = get_batch_on_this_cp_rank(batch, is_hybrid_cp=True)
    assert part is not batch
    assert list(part) == list(batch)
    assert all(part[name] is batch[name] for name in batch)


# Batches, on two ranks.


class Group:
    """Stands for this rank's place in a group of another size: slicing sends nothing."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def split_by_each_rank(batch: dict[str, Any], size: int, **options: Any) -> list[dict[str, Any]]:
    return [
        get_batch_on_this_cp_rank(batch, Group(size, rank), **options)  # type: ignore[arg-type]
        for rank in range(size)
    ]


def dense_batch(length: int = 16) -> dict[str, Any]:
    return {
        "tokens": torch.arange(2 * length).view(2, length),
        "labels": None,
        "attention_mask": torch.arange(2 * length * length).view(2, 1, length, length),
        "embeddings": torch.arange(2.0 * length * 3).view(2, length, 3),
        "positions": torch.arange(3 * length).view(length, 3).to(torch.int16),
        "max_seqlen": torch.tensor(length),
        "note": "kept",
    }


DENSE_DIMS = {"tokens": 1, "attention_mask": 2, "embeddings": 1, "positions": 0}


def split_dense_batches() -> None:
    for size in (2, 4):
        batch = dense_batch()
        before = {name: value.clone() for name, value in batch.items() if hasattr(value, "clone")}
        parts = split_by_each_rank(batch, size, seq_dims={"positions": 0})
        for rank, part in enumerate(parts):
            assert list(part) == list(batch)
            for name, dim in DENSE_DIMS.items():
                chunks = before[name].chunk(2 * size, dim)
                expected = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)
                assert torch.equal(part[name], expected), name
                assert part[name].dtype == batch[name].dtype
                assert part[name].is_contiguous()
                assert part[name].untyped_storage().nbytes() == expected.nbytes
            for name in ("labels", "max_seqlen", "note"):
                assert part[name] is batch[name]
        for name, dim in DENSE_DIMS.items():
            assert torch.equal(cp_unzigzag([part[name] for part in parts], dim), batch[name])
        assert all(torch.equal(batch[name], value) for name, value in before.items())


def split_odd_layouts() -> None:
    values = torch.randn(2, 4, 16, 4, dtype=torch.float64)
    layouts = {
        "transposed": values.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": values[:, :1].expand(2, 4, 16, 4),
        "channels_last": values.to(memory_format=torch.channels_last),
        "requires_grad": values.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(values.clone()),
        "bool": values > 0,
        "half": values.half(),
        "float8": values.to(torch.float8_e4m3fn),
    }
    parts = split_by_each_rank(layouts, 2, seq_dims=dict.fromkeys(layouts, 2))
    for name, tensor in layouts.items():
        chunks = tensor.detach().contiguous().view(torch.uint8).chunk(4, 2)
        for rank, part in enumerate(parts):
            expected = torch.cat((chunks[rank], chunks[3 - rank]), 2)
            assert torch.equal(part[name].detach().view(torch.uint8), expected), name
            assert part[name].is_contiguous(), name
    assert [part["requires_grad"].requires_grad for part in parts] == [True, True]
    weights = torch.randn(2, 4, 8, 4, dtype=torch.float64)
    (parts[0]["requires_grad"] * weights).sum().backward()
    expected_grad = torch.zeros_like(values)
    expected_grad[:, :, :4], expected_grad[:, :, 12:] = weights[:, :, :4], weights[:, :, 4:]
    assert torch.equal(layouts["requires_grad"].grad, expected_grad)


def split_masks() -> None:
    mask = torch.arange(256).view(1, 1, 16, 16)
    part = split_by_each_rank({"attention_mask": mask}, 2)[0]["attention_mask"]
    assert part.shape == (1, 1, 8, 16)
    flat = torch.arange(32).view(2, 16)
    part = split_by_each_rank({"attention_mask": flat}, 2)[1]["attention_mask"]
    assert torch.equal(part, flat[:, 4:12])
    queries = torch.arange(2 * 16 * 16).view(2, 16, 16)  # [b, sq, sk]
    part = split_by_each_rank({"tokens": flat, "attention_mask": queries}, 2)[1]["attention_mask"]
    assert torch.equal(part, queries[:, 4:12])
    keys = split_by_each_rank({"attention_mask": queries}, 2, seq_dims={"attention_mask": -1})[1]
    assert torch.equal(keys["attention_mask"], queries[..., 4:12])
    padding = torch.ones(2, 1, 16)  # [b, 1, sk]: no query to split
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 1, 16\) has length 1"):
        split_by_each_rank({"tokens": flat, "attention_mask": padding}, 2)
    kept = split_by_each_rank(
        {"tokens": flat, "attention_mask": padding}, 2, seq_dims={"attention_mask": None}
    )[0]
    assert kept["attention_mask"] is padding


def split_positions_of_several_axes() -> None:
    for rows in (4, 16, 3):
        batch = {
            "tokens": torch.arange(rows * 16).view(rows, 16),
            "position_ids": torch.arange(3 * rows * 16).view(3, rows, 16),  # time, height, width
        }
        part = split_by_each_rank(batch, 2)[1]
        assert torch.equal(part["position_ids"], batch["position_ids"][..., 4:12])
        assert torch.equal(part["tokens"], batch["tokens"][:, 4:12])
    packed = packed_batch(position_ids=torch.arange(48).view(3, 1, 16))
    part = split_by_each_rank(packed, 2)[0]
    whole = packed["position_ids"]
    assert torch.equal(part["position_ids"], whole[..., [0, 3, 4, 5, 6, 13, 14, 15]])


def split_metadata_that_seq_dims_name() -> None:
    batch = {"tokens": torch.zeros(1, 16), "max_seqlen": torch.arange(16), "cu_seqlens": None}
    part = split_by_each_rank(batch, 2, seq_dims={"max_seqlen": 0, "cu_seqlens": 0, "none": 0})[1]
    assert part["max_seqlen"].tolist() == [*range(4, 12)]
    assert part["cu_seqlens"] is None
    with pytest.raises(ValueError, match=r"max_seqlen of shape .* has length 12"):
        split_by_each_rank(batch | {"max_seqlen": torch.arange(12)}, 2, seq_dims={"max_seqlen": 0})
    part = split_by_each_rank(batch, 2, seq_dims={"tokens": None})[0]
    assert part == batch


def intermediate_stages() -> None:
    batch = dict.fromkeys(("tokens", "labels", "loss_mask", "cu_seqlens", "attention_mask"))
    for options in ({}, {"is_hybrid_cp": True}, {"use_per_sequence_balancing": True}):
        assert split_by_each_rank(batch, 2, **options) == [batch, batch]
    packed = batch | {"cu_seqlens": torch.tensor([0, 16])}
    assert split_by_each_rank(packed, 2) == [packed, packed]


def packed_batch(**changes: Any) -> dict[str, Any]:
    batch = {name: torch.arange(16).view(1, 16) for name in ("tokens", "labels", "position_ids")}
    batch["loss_mask"] = torch.ones(1, 16)
    batch["cu_seqlens"] = torch.tensor([[0, 4, 16]], dtype=torch.int32)
    batch["max_seqlen"] = torch.tensor([12])
    batch["attention_mask"] = None
    return batch | changes


def split_packed_batches() -> None:
    ranks = [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]
    batch = packed_batch(hidden=torch.arange(32.0).view(16, 2), other=torch.zeros(3))
    for rank, part in enumerate(split_by_each_rank(batch, 2, seq_dims={"hidden": 0})):
        for name in ("tokens", "labels", "position_ids"):
            assert part[name].tolist() == [ranks[rank]]
            assert part[name].is_contiguous()
        assert torch.equal(part["hidden"], batch["hidden"][ranks[rank]])
        for name in ("cu_seqlens", "max_seqlen", "attention_mask", "other"):
            assert part[name] is batch[name]
    padded = packed_batch(cu_seqlens=torch.tensor([0, 3, 13]))
    padded["cu_seqlens_padded"] = torch.tensor([0, 4, 16])
    assert [p["tokens"][0].tolist() for p in split_by_each_rank(padded, 2)] == ranks
    unpadded = packed_batch(cu_seqlens_padded=None)
    assert [p["tokens"][0].tolist() for p in split_by_each_rank(unpadded, 2)] == ranks
    whole = split_by_each_rank(
        batch,
        2,
        use_per_sequence_balancing=True,
        seq_dims={
            "hidden": 0,
            "other": None,
        },
    )
    assert whole[0]["tokens"].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert whole[0]["cu_seqlens"] is batch["cu_seqlens"]


def packed_shards_are_not_one_sequence() -> None:
    batch = packed_batch()
    shards = [part["tokens"] for part in split_by_each_rank(batch, 2)]
    with pytest.raises(ValueError, match=r"packed documents.*pass their cu_seqlens"):
        cp_unzigzag(shards, 1)
    assert torch.equal(cp_unzigzag(shards, 1, cu_seqlens=batch["cu_seqlens"]), batch["tokens"])


def split_hybrid_batches() -> None:
    asked = []

    def group_of(group_size: int) -> Group:
        asked.append(group_size)
        return Group(group_size, 1)

    for size in (2, torch.tensor([2], dtype=torch.int32)):
        part = get_batch_on_this_cp_rank(
            hybrid_batch(local_cp_size=size), is_hybrid_cp=True, hybrid_cp_group_func=group_of
        )
        assert part["tokens"].tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
        assert part["attention_mask"].shape == (1, 1, 8, 16)
        assert part["hybrid_cp_group"].size() == 2
        assert part["local_cp_size"] is size
    assert asked == [2, 2]
    whole_group: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (hybrid_batch(), {"use_per_sequence_balancing": True}),
        (hybrid_batch(cu_seqlens=None), {"hybrid_cp_group_func": group_of}),
        (hybrid_batch(cu_seqlens=None, local_cp_size=None), {}),
    ]
    for batch, options in whole_group:  # over the given group, whatever the batch requests
        for rank, part in enumerate(split_by_each_rank(batch, 4, is_hybrid_cp=True, **options)):
            assert part["tokens"].tolist() == [
                [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
            ]
            assert "hybrid_cp_group" not in part
    assert asked == [2, 2]
    with pytest.raises(ValueError, match=r"group_size=2\) returned a group of 4"):
        get_batch_on_this_cp_rank(
            hybrid_batch(), is_hybrid_cp=True, hybrid_cp_group_func=lambda group_size: Group(4, 0)
        )


def refuse_bad_batches() -> None:
    good = torch.zeros(2, 16)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"labels": torch.zeros(2, 15)}, {}, r"labels of shape \(2, 15\).*by 4"),
        (
            {"feat": torch.zeros(1, 4), "tokens": torch.zeros(1, 16)},
            {},
            r"feat of shape \(1, 4\) has length 4 in dim 1, tokens of shape \(1, 16\) 16 in dim 1"
            r".*seq_dims=\{'feat': None\}",
        ),
        ({"a": torch.zeros(8, 16), "b": good.t()}, {"seq_dims": {"b": 1}}, "b .*length 2 in dim 1"),
        (
            {"tokens": torch.zeros(16, 16), "rope": torch.zeros(3, 16, 16)},
            {},
            r"rope of shape \(3, 16, 16\) has 3 rows, tokens of shape \(16, 16\) 16.*seq_dims",
        ),
        ({"lengths": torch.zeros(16)}, {}, r"lengths of shape \(16,\) has no dim 1.*None"),
        ({"tokens": good}, {"seq_dims": {"tokens": 2}}, r"tokens of shape \(2, 16\) has no dim 2"),
        (packed_batch(cu_seqlens=torch.tensor([0, 6, 16])), {}, r"document 0 \[0, 6\)"),
        (packed_batch(cu_seqlens=torch.tensor([1, 16])), {}, "start at 0"),
        (packed_batch(cu_seqlens=torch.tensor([0, 8, 4, 16])), {}, "not decrease"),
        (packed_batch(cu_seqlens=torch.tensor([0, 8])), {}, r"ends at 8.*tokens.*\(1, 16\)"),
        (packed_batch(cu_seqlens=torch.zeros(2, 3)), {}, "2 rows.*flatten the micro-batch"),
        (packed_batch(labels=torch.zeros(1, 12)), {}, r"ends at 16, expected 12.*labels"),
        (packed_batch(labels=torch.zeros(16)), {}, r"labels of shape \(16,\)"),
        (packed_batch(attention_mask=torch.zeros(1, 1, 16, 16)), {}, "attention_mask"),
    ]
    for batch, options, message in cases:
        with pytest.raises(ValueError, match=message):
            get_batch_on_this_cp_rank(batch, dist.group.WORLD, **options)


def refuse_what_is_no_tensor() -> None:
    """An array would otherwise stay whole on every rank, without a word."""
    rows = [list(range(16))]
    for name, value in (("tokens", np.asarray(rows)), ("labels", rows), ("feat", np.zeros(16))):
        batch = {
            "position_ids": torch.tensor(rows),
            name: value,
            "cu_seqlens": torch.tensor([0, 16]),
        }
        for options in ({}, {"use_per_sequence_balancing": True}):
            with pytest.raises(TypeError, match=f"{name} is a (ndarray|list), which every rank"):
                get_batch_on_this_cp_rank(batch, dist.group.WORLD, seq_dims={name: 1}, **options)
            found = get_batch_on_this_cp_rank(
                batch, dist.group.WORLD, seq_dims={name: None}, **options
            )
            assert found[name] is value
            assert found["position_ids"].shape == (1, 8)
    with pytest.raises(TypeError, match="tokens is a list"):
        get_batch_on_this_cp_rank({"tokens": rows}, dist.group.WORLD)
    assert get_batch_on_this_cp_rank({"feat": rows}, dist.group.WORLD) == {"feat": rows}


def refuse_dtensors() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    tokens = distribute_tensor(torch.zeros(2, 16), mesh, [Replicate()])
    with pytest.raises(TypeError, match="tokens is a DTensor"):
        get_batch_on_this_cp_rank({"tokens": tokens}, mesh)


def find_the_group() -> None:
    batch = {"tokens": torch.arange(16).view(1, 16)}
    own = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]][dist.get_rank()]
    assert get_batch_on_this_cp_rank(batch)["tokens"] is batch["tokens"]
    with use_process_groups(ProcessGroups(cp=dist.group.WORLD)):
        assert get_batch_on_this_cp_rank(batch)["tokens"].tolist() == [own]
    mesh = dist.init_device_mesh("cpu", (2,))
    for group in (dist.group.WORLD, mesh):
        assert get_batch_on_this_cp_rank(batch, group)["tokens"].tolist() == [own]
    first = dist.new_group([0])
    if dist.get_rank() == 0:
        assert get_batch_on_this_cp_rank(batch, first)["tokens"] is batch["tokens"]
    else:
        with pytest.raises(ValueError, match="not a member"):
            get_batch_on_this_cp_rank(batch, first)


def on_two_ranks() -> None:
    for check in (
        split_dense_batches,
        split_odd_layouts,
        split_masks,
        split_positions_of_several_axes,
        split_metadata_that_seq_dims_name,
        intermediate_stages,
        split_packed_batches,
        packed_shards_are_not_one_sequence,
        split_hybrid_batches,
        refuse_bad_batches,
        refuse_what_is_no_tensor,
        refuse_dtensors,
        find_the_group,
    ):
        check()


def test_on_two_ranks() -> None:
    run_ranks(on_two_ranks, 2)


# Causal attention over the group: keys and values are gathered and put into order.

SEQUENCE, HEAD = 16, 4


def attention_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (SEQUENCE, 2, HEAD)  # sequence, batch, head dim
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n in "qkvw"}


def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    scores = torch.einsum("qbh,kbh->bqk", query, key)
    future = torch.arange(len(key))[None, :] > positions[:, None]
    return torch.einsum("bqk,kbh->qbh", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def attend_over_the_group() -> dict[str, Tensor]:
    group, size = dist.group.WORLD, dist.get_world_size()
    own = {
        name: value.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for name, value in get_batch_on_this_cp_rank(
            attention_inputs(), group, seq_dims=dict.fromkeys("qkvw", 0)
        ).items()
    }
    key, value = (
        cp_unzigzag(gather_from_sequence_parallel_region(own[n], group=group).chunk(size), 0)
        for n in "kv"
    )
    output = attend(own["q"], key, value, cp_zigzag_index(SEQUENCE, size, dist.get_rank()))
    (output * own["w"]).sum().backward()
    return {"output": output.detach()} | {name: own[name].grad for name in "qkv"}


@pytest.mark.parametrize("size", [2, 4])
def test_causal_attention_over_the_group_equals_one_process(size: int) -> None:
    whole = {name: value.requires_grad_() for name, value in attention_inputs().items()}
    output = attend(whole["q"], whole["k"], whole["v"], torch.arange(SEQUENCE))
    (output * whole["w"]).sum().backward()
    expected = {"output": output.detach()} | {name: whole[name].grad for name in "qkv"}
    parts = run_ranks(attend_over_the_group, size)
    for name, tensor in expected.items():
        gathered = cp_unzigzag([part[name] for part in parts], 0)
        torch.testing.assert_close(gathered, tensor, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_positions_from_borders_on_a_gpu() -> None:
    """Checks that borders on a GPU are read and that positions land on the given device."""
    borders = torch.tensor([0, 4, 16], device="cuda")
    index = cp_zigzag_index(16, 2, 0, cu_seqlens=borders, device="cuda")
    assert index.device.type == "cuda"
    assert index.tolist() == [0, 3, 4, 5, 6, 13, 14, 15]
