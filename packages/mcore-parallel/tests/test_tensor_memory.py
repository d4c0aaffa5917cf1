"""The memory of tensors as bytes: the same memory, in logical order, also piece by piece."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.tensor_memory import BytePieces, memory_of, plain_parts, stored_bytes


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


def memory(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def joined(pieces: object) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_on_the_cpu_is_read_where_it_is(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    [piece] = BytePieces(4096, as_float32=False).of(tensor)
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    assert (address, piece.nbytes) == (tensor.data_ptr(), tensor.nbytes)


def test_float32_is_not_converted() -> None:
    tensor = torch.zeros(7)
    [piece] = BytePieces(4096, as_float32=True).of(tensor)
    assert ctypes.addressof(ctypes.c_char.from_buffer(piece)) == tensor.data_ptr()


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(0, 100),
    staging_bytes=st.integers(16, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.float64]),
    as_float32=st.booleans(),
)
def test_staged_pieces_are_the_bytes_in_order(
    numel: int, staging_bytes: int, dtype: torch.dtype, as_float32: bool
) -> None:
    tensor = torch.arange(numel).to(dtype)
    pieces = BytePieces(staging_bytes, as_float32=as_float32)
    expected = tensor.float() if as_float32 else tensor
    staged = joined(p.view(torch.uint8).numpy() for p in pieces._stage(tensor))
    assert staged == memory(expected)
    assert len(staged) == stored_bytes(tensor, as_float32=as_float32)
    assert joined(pieces.of(tensor)) == staged


def test_the_next_copy_is_under_way_while_a_piece_is_read() -> None:
    tensor = torch.arange(48, dtype=torch.uint8)
    pieces = BytePieces(16, as_float32=False)
    staged = pieces._stage(tensor)
    first = next(staged)
    assert first.tolist() == list(range(16))
    assert pieces._buffers[1].tolist() == list(range(16, 32))
    second = next(staged)
    assert second.tolist() == list(range(16, 32))
    assert pieces._buffers[0].tolist() == list(range(32, 48))


def test_only_two_buffers_of_the_given_size_are_used_for_any_number_of_tensors() -> None:
    pieces = BytePieces(16, as_float32=True)
    for numel in (1, 100, 1000):
        assert joined(
            p.view(torch.uint8).numpy() for p in pieces._stage(torch.ones(numel).bfloat16())
        ) == memory(torch.ones(numel))
    assert [buffer.nbytes for buffer in pieces._buffers] == [16, 16]


def test_layouts_are_read_in_logical_order() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    strided = torch.arange(24.0).reshape(4, 3, 2).permute(2, 1, 0)
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    pieces = BytePieces(4096, as_float32=False)
    assert joined(pieces.of(strided)) == memory(
        strided.clone(memory_format=torch.contiguous_format)
    )
    assert joined(pieces.of(image)) == memory(base)
    assert joined(pieces.of(base[1])) == memory(base)[48:]
    assert joined(pieces.of(torch.tensor(1.5))) == memory(torch.tensor([1.5]))


@pytest.mark.parametrize("as_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_one_element_with_a_stride_is_one_element(dtype: torch.dtype, as_float32: bool) -> None:
    tensor = torch.arange(6).to(dtype)[2::3][:1]
    expected = torch.tensor([2.0]).to(torch.float32 if as_float32 else dtype)
    assert tensor.stride() == (3,)
    pieces = BytePieces(4096, as_float32=as_float32)
    assert joined(pieces.of(tensor)) == memory(expected)


def test_conjugated_and_negated_views_give_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    [part] = plain_parts(torch.nn.Parameter(values.conj(), requires_grad=False))
    expected = torch.tensor([1 - 2j, 3 + 4j])
    pieces = BytePieces(4096, as_float32=False)
    assert joined(pieces.of(part.tensor)) == memory(expected)
    [part] = plain_parts(values.conj().imag)  # a view with the negative bit
    assert joined(pieces.of(part.tensor)) == memory(torch.tensor([-2.0, 4.0]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks copies from a CUDA device")
@pytest.mark.parametrize("as_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_tensor_gives_the_bytes_of_its_copy_on_the_cpu(dtype, as_float32) -> None:
    tensor = torch.randn(1000, 33, device="cuda").to(dtype)
    torch.cuda.synchronize()
    pieces = BytePieces(4096, as_float32=as_float32)
    expected = BytePieces(4096, as_float32=as_float32)
    assert joined(pieces.of(tensor)) == joined(expected.of(tensor.cpu()))
    assert joined(pieces.of(tensor.t())) == joined(expected.of(tensor.cpu().t()))
    assert all(buffer.is_pinned() for buffer in pieces._buffers)
