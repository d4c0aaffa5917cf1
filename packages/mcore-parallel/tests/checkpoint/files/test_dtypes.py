"""Every dtype: its tensors are loaded bit for bit, or are refused by the save."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)

DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)

ON_DEVICE = [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint16]


def of_bytes(dtype: torch.dtype, first: int, rows: int) -> torch.Tensor:
    """Return a tensor of 6 columns with given bytes."""
    count = rows * 6 * dtype.itemsize
    if dtype == torch.bool:
        return (torch.arange(rows * 6) % 2 == first % 2).view(rows, 6)
    return (torch.arange(first, first + count) % 120).to(torch.uint8).view(dtype).view(rows, 6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_or_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    check_dtype(dtype, tmp_path)


@pytest.mark.parametrize("dtype", ON_DEVICE, ids=str)
def test_a_tensor_of_a_device_comes_back(
    accelerator: torch.device, dtype: torch.dtype, tmp_path: Path
) -> None:
    with accelerator:
        check_dtype(dtype, tmp_path)


def check_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    value = of_bytes(dtype, 1, 4)
    shard = ShardedTensor("v", value, dtype, (4, 6), (4, 6), (0, 0), None)
    state = {"w": value, "s": shard}
    if re.fullmatch(r"torch\.(u?int[1-7]|q.*)", str(dtype)):
        with pytest.raises(
            CheckpointingException, match=f"{dtype}, which torch.save does not know"
        ):
            save_sharded_state_dict(state, tmp_path / "a")
        assert not list(tmp_path.iterdir())
        return
    save_sharded_state_dict(state, tmp_path / "a")
    expected = value.view(torch.uint8)
    target = of_bytes(dtype, 7, 4)
    loaded = load_sharded_state_dict({"w": target}, tmp_path / "a", unexpected="ignore")["w"]
    assert loaded is target
    assert torch.equal(target.view(torch.uint8), expected)
    # Rows 1 to 2 of a shard, and columns of it.
    part = of_bytes(dtype, 7, 2)
    shard = ShardedTensor("v", part, dtype, (2, 6), (4, 6), (1, 0), None)
    load_sharded_state_dict({"s": shard}, tmp_path / "a", unexpected="ignore")
    assert torch.equal(part.view(torch.uint8), expected[1:3])
    columns = of_bytes(dtype, 7, 4)[:, 1:3]
    shard = ShardedTensor("v", columns, dtype, (4, 2), (4, 6), (0, 2), None)
    load_sharded_state_dict({"s": shard}, tmp_path / "a", unexpected="ignore")
    size = dtype.itemsize
    assert torch.equal(columns.clone().view(torch.uint8), expected[:, 2 * size : 4 * size])


@pytest.mark.usefixtures("on_each_device")
def test_a_finite_value_that_becomes_infinite_is_a_warning_with_its_key(tmp_path: Path) -> None:
    save_sharded_state_dict(
        {"large": torch.tensor([1e30, 1.0]), "inf": torch.tensor([float("inf")])}, tmp_path / "a"
    )
    half = {"large": torch.zeros(2, dtype=torch.float16), "inf": torch.zeros(1).half()}
    with pytest.warns(UserWarning, match="key 'large': finite values became infinite") as caught:
        load_sharded_state_dict(half, tmp_path / "a")
    assert len(caught) == 1
    assert half["large"].tolist() == [float("inf"), 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_sharded_state_dict(
            {"large": torch.zeros(2).bfloat16(), "inf": torch.zeros(1).half()}, tmp_path / "a"
        )


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("shape", "strides", "is_refused"),
    [
        ((3, 2), (1, 1), True),
        ((3, 2), (2, 3), False),  # interleaved, all places differ
        ((3, 2), (2, 4), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (0, 1), False),
        ((0, 3), (1, 1), False),
    ],
)
def test_targets_that_overlap_themselves_are_refused(
    shape: tuple[int, int], strides: tuple[int, int], is_refused: bool, tmp_path: Path
) -> None:
    value = torch.arange(float(shape[0] * shape[1])).view(shape)
    save_sharded_state_dict({"w": value}, tmp_path / "a")
    target = torch.zeros(12).as_strided(shape, strides)
    if is_refused:
        with pytest.raises(CheckpointingException, match=r"'w': .* overlaps itself"):
            load_sharded_state_dict({"w": target}, tmp_path / "a")
        assert not target.any()
    else:
        load_sharded_state_dict({"w": target}, tmp_path / "a")
        assert torch.equal(target, value)
