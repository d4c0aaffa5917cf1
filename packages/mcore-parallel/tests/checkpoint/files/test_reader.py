"""Tensors are read straight from where their elements lie in the files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from mcore.parallel.checkpoint import (
    ShardedTensor,
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.files.pieces import Part, Scratch, SkippingStream, read_shard


@st.composite
def slices(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """Shape of a tensor, and start and shape of a slice of it."""
    shape = draw(st.lists(st.integers(1, 9), max_size=4))
    start = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)]
    return shape, start, sizes


@settings(deadline=None)
@given(
    slices(),
    st.sampled_from([torch.float64, torch.int16, torch.bool, torch.bfloat16, torch.complex64]),
    st.booleans(),
)
@example(([2, 1], [0, 0], [2, 1]), torch.float64, False)  # contiguous, with a last stride of 2
def test_slices_are_those_of_the_tensor(
    place: tuple[list[int], list[int], list[int]], dtype: torch.dtype, backwards: bool
) -> None:
    shape, start, sizes = place
    whole = torch.randint(0, 2, shape).to(dtype)
    content = b"header." + bytes(whole.contiguous().view(-1).view(torch.uint8).tolist())
    target = torch.zeros(sizes[::-1], dtype=dtype).permute(tuple(range(len(sizes)))[::-1])
    if not backwards:
        target = target.contiguous()
    stream = SkippingStream(io.BytesIO(content), 7, Scratch(128))
    read_shard(stream, tuple(shape), [Part(tuple(start), target)], dtype)
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    assert torch.equal(target, whole)


SAVED: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.randn(6, 4).t(),
    "slice of a larger one": lambda: torch.randn(10, 8)[2:6, 1:7],
    "view at an offset": lambda: torch.randn(24)[8:20].view(3, 4),
    "expanded": lambda: torch.randn(4, 1).expand(4, 5),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3.5),
    "bool": lambda: torch.tensor([True, False, True]),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "rows above a mebibyte": lambda: torch.randn(2, 300_000),
}


@pytest.mark.parametrize("name", SAVED)
def test_all_kinds_of_memory_come_back_directly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    saved = SAVED[name]()
    whole = saved.resolve_conj().resolve_neg().contiguous()
    save_sharded_state_dict({"w": make_sharded_tensor_for_checkpoint(saved, "w")}, tmp_path / "a")

    def refuse(*args: Any) -> None:
        raise AssertionError("the archive is unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(FileSystemReader, "read_data", refuse)
    target = make_sharded_tensor_for_checkpoint(torch.zeros_like(whole), "w")
    loaded = load_sharded_state_dict({"w": target}, tmp_path / "a")["w"]
    assert torch.equal(loaded.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))
    if whole.ndim > 1:
        strided = torch.zeros(*whole.shape[:-1], 2 * whole.shape[-1], dtype=whole.dtype)[..., ::2]
        target = make_sharded_tensor_for_checkpoint(strided, "w")
        assert torch.equal(load_sharded_state_dict({"w": target}, tmp_path / "a")["w"], whole)
        half = ShardedTensor.from_rank_offsets("w", torch.zeros_like(whole[:1]), (0, 1, len(whole)))
        assert torch.equal(load_sharded_state_dict({"w": half}, tmp_path / "a")["w"], whole[1:2])


def test_values_are_cast_on_the_way(tmp_path: Path) -> None:
    whole = torch.randn(40, 30)
    save_sharded_state_dict({"w": make_sharded_tensor_for_checkpoint(whole, "w")}, tmp_path / "a")
    target = make_sharded_tensor_for_checkpoint(torch.zeros(40, 30, dtype=torch.bfloat16), "w")
    loaded = load_sharded_state_dict({"w": target}, tmp_path / "a")["w"]
    assert torch.equal(loaded, whole.bfloat16())


def test_a_load_is_seen_by_autograd(tmp_path: Path) -> None:
    """A backward pass through values from before the load must not use those from after it."""
    weight = torch.nn.Parameter(torch.ones(3))
    save_sharded_state_dict({"w": make_sharded_tensor_for_checkpoint(weight, "w")}, tmp_path / "a")
    result = (weight * weight).sum()
    load_sharded_state_dict({"w": make_sharded_tensor_for_checkpoint(weight, "w")}, tmp_path / "a")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
