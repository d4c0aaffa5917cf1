"""The memory of tensors as Python bytes, without NumPy, which torch does not require."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch

from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor

_CAST_ELEMENTS = 1 << 18  # of float32 at a time: 1 MiB stays in the cache


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor without a copy. It keeps the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order as bytes, from any device and layout."""
    return bytes(memory_of(row_major_on_cpu(tensor)))


def row_major_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous, detached tensor of the same values on the CPU, copied if necessary."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


class Part(NamedTuple):
    """A plain tensor inside a parameter, with the path of attributes to it."""

    path: str
    tensor: torch.Tensor


def plain_parts(tensor: torch.Tensor) -> list[Part]:
    """Return the plain detached tensors that hold a tensor's values on this rank, uncopied."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError("it is not initialised: run a forward pass first")
    if is_dtensor(tensor):
        return plain_parts(to_local_if_dtensor(tensor))
    if hasattr(type(tensor), "__tensor_flatten__"):
        wrapper: Any = tensor
        names, _ = wrapper.__tensor_flatten__()
        inner = [(name, plain_parts(getattr(tensor, name))) for name in names]
        return [Part(f"{name}.{part.path}", part.tensor) for name, parts in inner for part in parts]
    return [Part("", _require_plain(tensor))]


def _require_plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"it is a {type(tensor).__name__} without __tensor_flatten__, so the tensors inside "
            "are not known"
        )
    if tensor.is_meta:
        raise ValueError("it is on the meta device: materialise it first")
    if tensor.layout != torch.strided:
        raise ValueError(f"it has layout {tensor.layout}: make it dense first")
    if tensor.is_quantized:
        raise ValueError(f"it has dtype {tensor.dtype}: dequantize it first")
    return tensor.detach().resolve_conj().resolve_neg()


def stored_bytes(tensor: torch.Tensor, *, as_float32: bool) -> int:
    """Return the number of bytes that :class:`BytePieces` yields for a plain tensor."""
    return tensor.numel() * (4 if as_float32 else tensor.element_size())


class BytePieces:
    """Reads plain tensors piece by piece. Each thread has one reader for all its tensors."""

    def __init__(self, staging_bytes: int, *, as_float32: bool) -> None:
        self._staging_bytes = staging_bytes  # of each of two buffers; at least 16
        self._as_float32 = as_float32  # converts the values, of complex numbers the real part
        self._buffers: list[torch.Tensor] = []
        self._scratch: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes in row-major order, each piece valid until the next."""
        values = tensor.real if self._as_float32 and tensor.is_complex() else tensor
        flat = values.contiguous().reshape(-1)
        if flat.device.type == "cpu":
            is_ready = not self._as_float32 or flat.dtype == torch.float32
            yield from map(memory_of, (flat,) if is_ready else self._convert(flat))
        else:
            yield from map(memory_of, self._stage(flat))

    def _convert(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        if self._scratch is None:
            self._scratch = torch.empty(_CAST_ELEMENTS, dtype=torch.float32, device="cpu")
        for piece in _split(flat, _CAST_ELEMENTS):
            yield self._scratch[: piece.numel()].copy_(piece)

    def _stage(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield pieces in host memory while the next piece is copied."""
        if not self._buffers:
            is_pinned = flat.device.type != "cpu"
            num_bytes = self._staging_bytes
            self._buffers = [
                torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
                for _ in range(2)
            ]
        itemsize = 4 if self._as_float32 else flat.element_size()
        pending: _Copy | None = None
        pieces = _split(flat, self._staging_bytes // itemsize)
        for buffer, piece in zip(cycle(self._buffers), pieces, strict=False):
            following = _Copy(piece.float() if self._as_float32 else piece, buffer)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


class _Copy:
    """A started copy to host memory."""

    def __init__(self, piece: torch.Tensor, buffer: torch.Tensor) -> None:
        self._piece = piece  # keeps a converted piece alive until it has arrived
        self._target = buffer[: piece.nbytes].view(piece.dtype)
        self._target.copy_(piece, non_blocking=True)
        self._arrived: torch.Event | None = None
        if piece.device.type != "cpu":
            self._arrived = torch.Event(piece.device)
            self._arrived.record(torch.accelerator.current_stream(piece.device))

    def result(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._target


def _split(flat: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
    return (flat[start : start + length] for start in range(0, flat.numel(), length))
