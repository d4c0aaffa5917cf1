import pytest
import torch
import torch.distributed as dist

from mcore.parallel import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from rank_testing import run_ranks

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def packed_batch(rows):
    return {
        **{key: torch.arange(rows * 8).view(rows, 8) for key in KEYS},
        "cu_seqlens": torch.tensor([[0, 3, 8, 8], [0, 8, 8, 8]][:rows], dtype=torch.int32),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8], [0, 4, 7]][:rows], dtype=torch.int32),
        "max_seqlen": torch.tensor([5, 8][:rows]),
        "other": "kept",
    }


def test_rows_become_one_stream():
    batch = packed_batch(2)
    flat = flatten_batch_for_packed_sequences(batch)
    assert all(flat[key].tolist() == [list(range(16))] for key in KEYS)
    assert flat["cu_seqlens"].tolist() == [[0, 3, 8, 16]]
    assert flat["cu_seqlens"].dtype == torch.int32
    assert flat["cu_seqlens_padded"].tolist() == [[0, 4, 8, 12, 15]]
    assert (flat["max_seqlen"].tolist(), flat["other"]) == ([8], "kept")
    assert batch["tokens"].shape == (2, 8)
    flat.pop("cu_seqlens_padded")
    assert get_batch_on_this_cp_rank(flat)["tokens"].shape == (1, 16)


def test_one_row_and_no_borders():
    flat = flatten_batch_for_packed_sequences(packed_batch(1))
    assert flat["cu_seqlens"].tolist() == [[0, 3, 8]]
    assert flat["max_seqlen"].tolist() == [5]
    batch = {"tokens": torch.zeros(2, 4), "cu_seqlens": None}
    assert flatten_batch_for_packed_sequences(batch) is batch


def test_borders_of_other_rows_are_refused():
    batch = {"tokens": torch.zeros(3, 8), "cu_seqlens": torch.tensor([[0, 8], [0, 8]])}
    with pytest.raises(ValueError, match="2 rows and the batch 3 samples"):
        flatten_batch_for_packed_sequences(batch)


def shared(stage, stages=2, mtp=False, **changes):
    """The batch that a rank gets, as lists."""
    rank = dist.get_rank()
    batch = None
    if rank == 0:
        batch = {**packed_batch(2), "local_cp_size": 2, **changes}
        batch["attention_mask"] = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    sizes = (1, rank, 2, 8, mtp, stages, stage == 0, stage == stages - 1)
    world = dist.group.WORLD
    try:
        found = get_batch_on_this_tp_rank(batch, True, False, True, 0, world, *sizes)
    except ValueError as error:
        return str(error)
    return {
        key: None if value is None else (str(value.dtype), value.tolist())
        for key, value in found.items()
    }


def all_shared():
    return {
        "first": shared(0),
        "middle": shared(1, stages=3),
        "last": shared(1),
        "alone": shared(0, stages=1),
        "mtp": shared(1, stages=3, mtp=True),
        "missing": shared(0, tokens=None),
        "shape": shared(0, tokens=torch.zeros(2, 7)),
        "deep": shared(0, tokens=torch.zeros(1, 1, 1, 1, 1)),
    }


def test_all_ranks_get_the_batch_of_rank_zero():
    first, second = run_ranks(all_shared, 2)
    assert first.keys() == second.keys()
    for name in ("first", "middle", "last", "alone", "mtp", "missing", "shape"):
        assert first[name] == second[name], name
    with_all = {key for key, value in first["alone"].items() if value is not None}
    borders = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "attention_mask"}
    assert with_all == {*KEYS, *borders}
    assert {key for key, value in first["mtp"].items() if value} == with_all
    assert {key for key, value in first["middle"].items() if value} == borders
    assert {key for key, value in first["first"].items() if value} == {
        "tokens",
        "position_ids",
        *borders,
    }
    assert first["last"]["labels"] == ("torch.int64", torch.arange(16).view(2, 8).tolist())
    assert first["last"]["loss_mask"][0] == "torch.float32"
    assert first["last"]["tokens"] is None
    assert "lacks ['tokens']" in first["missing"]
    assert "shape (2, 7)" in first["shape"]
    assert "cannot be sent" in first["deep"]
    assert "cannot be sent" in second["deep"]
