"""What a load fills, what it refuses before it fills anything, and what it says of the rest."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedTensor,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from rank_testing import run_ranks


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.usefixtures("on_each_device")
def test_keys_that_nobody_asks_for_are_reported(tmp_path: Path) -> None:
    whole = {f"layer.{i}": torch.ones(2) for i in range(30)}
    save_sharded_state_dict(whole, tmp_path / "a")
    part = {"layer.7": torch.zeros(2)}
    with pytest.warns(UserWarning, match=r"in no rank's .* \(29 keys\):\n  - layer.0\n") as got:
        load_sharded_state_dict(part, tmp_path / "a")
    assert [one.filename for one in got if "in no rank's" in str(one.message)] == [__file__]
    assert part["layer.7"].tolist() == [1, 1]
    part["layer.7"].zero_()
    with pytest.raises(CheckpointingException, match=r"\(29 keys\)"):
        load_sharded_state_dict(part, tmp_path / "a", unexpected="raise")
    assert part["layer.7"].tolist() == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_sharded_state_dict(part, tmp_path / "a", unexpected="ignore")
        load_sharded_state_dict(whole, tmp_path / "a", unexpected="raise")
    for name, value in (("unexpected", "error"), ("verify", True), ("verify", "after")):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            load_sharded_state_dict(whole, tmp_path / "a", **{name: value})  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("unexpected", ["raise", "warn", "ignore"])
def test_a_fresh_optimizer_gets_no_empty_state_in_silence(unexpected: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"model": model.state_dict(), "optim": stepped(model).state_dict()}
    save_sharded_state_dict(state, tmp_path / "a")
    fresh = torch.optim.AdamW(model.parameters()).state_dict()
    with torch.no_grad():
        model.weight.zero_()
    target = {"model": model.state_dict(), "optim": fresh}
    with pytest.raises(CheckpointingException, match=r"nothing of the 6 keys .* 'optim\.state\.0"):
        load_sharded_state_dict(target, tmp_path / "a", unexpected=unexpected)
    assert not model.weight.any()
    made = stepped(model).state_dict()
    loaded = load_sharded_state_dict({"model": model.state_dict(), "optim": made}, tmp_path / "a")
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], torch.full((2, 3), 0.1))
    save_sharded_state_dict({"optim": fresh}, tmp_path / "b")
    assert load_sharded_state_dict({"optim": fresh}, tmp_path / "b")["optim"]["state"] == {}


def test_targets_that_cannot_be_filled_are_refused_first(tmp_path: Path) -> None:
    save_sharded_state_dict({"a": torch.ones(4, 3), "b": torch.ones(4, 3)}, tmp_path / "a")
    with torch.inference_mode():
        inference = torch.zeros(4, 3)
    for bad, words in (
        (torch.zeros(3).expand(4, 3), "is expanded"),
        (torch.zeros(4, 1).expand(4, 3), "is expanded"),
        (inference, "was made in inference mode"),
        (torch.zeros(4, 3).to_sparse(), "is not plain memory"),
    ):
        for wrapped in (True, False):
            target = make_sharded_tensor_for_checkpoint(bad, "b") if wrapped else bad
            good = torch.zeros(4, 3)
            with pytest.raises(
                CheckpointingException, match=f"key 'b': the tensor to fill {words}"
            ):
                load_sharded_state_dict({"a": good, "b": target}, tmp_path / "a")
            assert not good.any()
            assert not bad.to_dense().any()
    with torch.inference_mode():
        load_sharded_state_dict({"a": inference, "b": torch.zeros(4, 3)}, tmp_path / "a")
        assert inference.all()
    strided = torch.zeros(3, 4).t()
    load_sharded_state_dict({"a": strided, "b": torch.zeros(4, 6)[:, ::2]}, tmp_path / "a")
    assert strided.all()


def flip_middle(path: Path, key: str) -> None:
    """Flip a bit of the elements of a key."""
    from mcore.parallel.checkpoint.files.index import read_index

    [piece] = read_index(path).keys[key].pieces
    content = bytearray((path / piece.file).read_bytes())
    content[piece.at + piece.length // 2] ^= 4
    (path / piece.file).write_bytes(content)


@pytest.mark.usefixtures("on_each_device")
def test_damage_found_while_reading_says_that_targets_are_partly_filled(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((3000,), float(i + 1)) for i in range(4)}
    save_sharded_state_dict(tensors, tmp_path / "a")
    flip_middle(tmp_path / "a", "w2")
    targets = {key: torch.zeros(3000) for key in tensors}
    with pytest.raises(CheckpointingException, match="key 'w2' has changed") as caught:
        load_sharded_state_dict(targets, tmp_path / "a")
    assert "may have been filled in part: load another checkpoint" in str(caught.value)
    assert torch.equal(targets["w0"], tensors["w0"])
    assert not targets["w3"].any()
    targets = {key: torch.zeros(3000) for key in tensors}
    with pytest.raises(CheckpointingException, match="key 'w2' has changed") as caught:
        load_sharded_state_dict(targets, tmp_path / "a", verify="before")
    assert "filled" not in str(caught.value)
    assert not any(target.any() for target in targets.values())
    load_sharded_state_dict(targets, tmp_path / "a", verify=False)
    assert torch.equal(targets["w3"], tensors["w3"])


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(slice(0, 2), slice(5)), (slice(3, 7), slice(1, 4)), (slice(6, 7), slice(5))],
)
def test_damage_in_what_another_rank_needs_is_found_too(
    rows: slice, columns: slice, tmp_path: Path
) -> None:
    """A piece is checked whole, whichever part of it is wanted and however large its rows are."""
    from mcore.parallel.checkpoint import ShardedTensor

    whole = torch.arange(7 * 5 * 60_000.0).reshape(7, 5, 60_000)  # rows above the scratch memory
    save_sharded_state_dict({"w": whole}, tmp_path / "a")
    want = whole[rows, columns, 100:200]
    offset = (rows.start, columns.start or 0, 100)

    def load() -> torch.Tensor:
        target = torch.zeros_like(want)
        shard = ShardedTensor(
            "w", target, target.dtype, tuple(want.shape), tuple(whole.shape), offset, None
        )
        load_sharded_state_dict({"w": shard}, tmp_path / "a")
        return target

    assert torch.equal(load(), want)
    path = tmp_path / "a" / "__0_0.distcp"
    for at in (400_000, path.stat().st_size // 2, path.stat().st_size - 300):
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointingException, match="key 'w' has changed"):
            load()
        content[at] ^= 1
        path.write_bytes(content)
    assert torch.equal(load(), want)


def load_with_choices_of_two(folder: str) -> str:
    save_sharded_state_dict({"n": 1, "more": 2}, folder)
    choice: Any = ("ignore", "raise")[torch.distributed.get_rank()]
    with pytest.raises(CheckpointingException) as caught:
        load_sharded_state_dict({"n": 0}, folder, unexpected=choice)
    return str(caught.value)


def test_ranks_that_treat_unexpected_keys_differently_still_agree(tmp_path: Path) -> None:
    first, second = run_ranks(load_with_choices_of_two, 2, str(tmp_path / "a"))
    assert first == second
    assert "rank 1: some keys of the checkpoint are in no rank's state dict" in first


def cut(whole: torch.Tensor, rows: int, columns: int) -> dict[str, ShardedTensor]:
    """The shards of a tensor on a grid."""
    height, width = whole.shape[0] // rows, whole.shape[1] // columns
    return {
        f"{row}.{column}": ShardedTensor.from_rank_offsets(
            "w",
            whole[row * height :, column * width :][:height, :width].clone(),
            (0, row, rows),
            (1, column, columns),
        )
        for row in range(rows)
        for column in range(columns)
    }


@pytest.mark.parametrize("grid", [(1, 1), (4, 5), (100, 1), (25, 30)])
def test_a_key_of_150_pieces_is_loaded_into_other_pieces(
    grid: tuple[int, int], tmp_path: Path
) -> None:
    whole = torch.arange(3000.0).view(100, 30)
    save_sharded_state_dict(cut(whole, 50, 3), tmp_path / "a")
    loaded = load_sharded_state_dict(cut(torch.zeros_like(whole), *grid), tmp_path / "a")
    expected = {name: shard.data for name, shard in cut(whole, *grid).items()}
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def test_one_shard_of_many_pieces_and_one_beyond_them(tmp_path: Path) -> None:
    whole = torch.arange(3000.0).view(100, 30)
    save_sharded_state_dict(cut(whole, 50, 3), tmp_path / "a")
    middle = ShardedTensor.from_rank_offsets("w", torch.zeros(20, 6), (0, 2, 5), (1, 3, 5))
    loaded = load_sharded_state_dict({"w": middle}, tmp_path / "a")
    assert torch.equal(loaded["w"], whole[40:60, 18:24])
    rest = torch.ones(100, 30)
    beyond = ShardedTensor.from_rank_offsets("w", rest, (0, 1, 2), allow_shape_mismatch=True)
    assert not load_sharded_state_dict({"w": beyond}, tmp_path / "a")["w"].any()


def test_a_target_of_one_element_may_have_any_stride_and_counts_its_change(tmp_path: Path) -> None:
    save_sharded_state_dict({"a": torch.full((1,), 2.5)}, tmp_path / "a")
    target = torch.zeros(2)[::2]
    version = target._version
    load_sharded_state_dict({"a": target}, tmp_path / "a")
    assert (target.stride(), target.tolist()) == ((2,), [2.5])
    assert target._version > version  # autograd would refuse a saved tensor that has changed
