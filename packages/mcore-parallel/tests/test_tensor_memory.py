"""The memory of a tensor as bytes: the same memory, for as long as it is looked at."""

from __future__ import annotations

import gc
import struct
import weakref

import pytest
import torch

from mcore.parallel.tensor_memory import memory_of


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_there_are_as_many_bytes_as_the_tensor_has(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    memory = memory_of(tensor)
    assert (memory.nbytes, memory.format, memory.ndim) == (tensor.nbytes, "B", 1)


def test_the_bytes_are_the_tensor_and_not_a_copy() -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=torch.float64)[1:]
    memory = memory_of(tensor)
    assert bytes(memory) == struct.pack("=d", -2.0)
    memory[:] = struct.pack("=d", 3.25)
    assert tensor.tolist() == [3.25]


def test_the_tensor_lives_as_long_as_its_bytes() -> None:
    tensor = torch.full((1000,), 7, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    memory = memory_of(tensor)[10:20]
    del tensor
    gc.collect()
    assert alive() is not None
    assert memory.tolist() == [7] * 10
    del memory
    gc.collect()
    assert alive() is None
