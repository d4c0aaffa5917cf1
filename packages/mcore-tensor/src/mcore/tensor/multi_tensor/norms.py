"""L2 norms of many tensors that share a device and a dtype.

On the CPU an operation costs as much as thousands of additions, so short tensors are packed. A
float32 sum over thousands of squares is wrong in the sixth digit, so squares are summed in short
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore.tensor.device import are_traced
from mcore.tensor.multi_tensor.scaling import Scratch

# Elements summed at once: 64 to 256 in each lane of a vector register, with an error up to 2e-6.
_ROW = 1 << 10
_STREAMS = 4  # parts of a long tensor read alternately: up to 1.4 times the memory bandwidth
_STRIDE = _STREAMS * _ROW
_LONG = 1 << 14  # tensors with more elements are not packed: the copy costs more than it saves
_PACK = 1 << 19  # elements packed together, few enough for the cache
_NARROW = (torch.float16, torch.bfloat16)


def norms_of_pieces(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """Return norms, float32 or wider, of disjoint pieces that together cover the tensors."""
    if are_traced(tensors):
        return torch.cat([_trace_row_norms(tensor) for tensor in tensors])
    if tensors[0].device.type != "cpu":
        return _compute_norms(tensors)
    rows = _Rows(tensors[0].dtype, sum(lengths))
    if max(lengths) >= _LONG:
        rests = [rows.add_long(one) for one, n in zip(tensors, lengths, strict=True) if n >= _LONG]
        tensors = [one for one, n in zip(tensors, lengths, strict=True) if n < _LONG]
        tensors += [rest for rest in rests if rest is not None]
        lengths = [tensor.numel() for tensor in tensors]
    rows.add_packed(tensors, lengths)
    return rows.norms()


def norms_of_tensors(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """Return the norm of each tensor in their order, float32 or wider."""
    if are_traced(tensors):
        norms = [_trace_row_norms(tensor).square().sum().sqrt() for tensor in tensors]
        return torch.stack(norms)
    if tensors[0].device.type != "cpu":
        return _compute_norms(tensors)
    rows = _Rows(tensors[0].dtype, sum(lengths))
    owners: list[int] = []  # for each run of rows, the index of its tensor
    num_rows: list[int] = []
    short: list[tuple[int, Tensor, int]] = []
    for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        if length < _LONG:
            short.append((index, tensor, length))
            continue
        rest = rows.add_long(tensor)
        owners.append(index)
        num_rows.append(length // _STRIDE * _STREAMS)
        if rest is not None:
            short.append((index, rest, length % _STRIDE))
    pieces: list[Tensor] = []
    sizes: list[int] = []
    # Each short tensor is filled up with zeros to full rows: a row must not have two owners.
    zeros = tensors[0].new_zeros(_ROW)
    fills = {missing: zeros[:missing] for missing in {-length % _ROW for _, _, length in short}}
    for index, tensor, length in short:
        missing = -length % _ROW
        pieces += (tensor, fills[missing])
        sizes += (length, missing)
        owners.append(index)
        num_rows.append((length + missing) // _ROW)
    rows.add_packed(pieces, sizes)
    row_norms = rows.norms()
    owner_of_row = torch.repeat_interleave(
        torch.tensor(owners, device="cpu"),
        torch.tensor(num_rows, device="cpu"),
        output_size=len(row_norms),
    )
    # A tensor has up to millions of rows: float64 keeps the error that of a single row.
    squares = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    squares.index_add_(0, owner_of_row, row_norms.square().double())
    return squares.to(row_norms.dtype).sqrt_()


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compute_norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=_widen(tensors[0].dtype)))


def _trace_row_norms(tensor: Tensor) -> Tensor:
    """Return the norms of a tensor's short rows by operations that every compiler supports."""
    flat = tensor.reshape(-1).to(_widen(tensor.dtype))
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _ROW))
    norms: Tensor = torch.linalg.vector_norm(padded.view(-1, _ROW), dim=1)
    return norms


def _flatten(tensor: Tensor) -> Tensor:
    """Return the elements in any order in one dimension, without a copy if they are dense."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


class _Rows:
    """Norms of short rows, with the memory for packing, which is allocated once."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self._dtype = dtype
        self._scratch = Scratch(min(length, _PACK) + _LONG)
        self._norms: list[Tensor] = []
        self._zero_and_one = torch.tensor([[[0.0]], [[1.0]]], device="cpu").unbind()

    def norms(self) -> Tensor:
        """Return all norms, in the order of the added rows."""
        return self._norms[0] if len(self._norms) == 1 else torch.cat(self._norms)

    def add_long(self, tensor: Tensor) -> Tensor | None:
        """Add the full rows of a tensor, from all streams. Return the remaining elements."""
        flat = tensor if tensor.is_contiguous() else _flatten(tensor).contiguous()
        flat = flat.view(-1)
        rest = None
        num_left = flat.numel() % _STRIDE
        if num_left:
            flat, rest = flat[:-num_left], flat[-num_left:]
        if self._dtype in _NARROW:
            self._add(flat.view(-1, _ROW))
        else:
            self._add(flat.view(_STREAMS, -1, _ROW).transpose(0, 1))
        return rest

    def add_packed(self, tensors: list[Tensor], lengths: list[int]) -> None:
        """Add short tensors, joined to one."""
        start = packed = 0
        for end, length in enumerate(lengths, 1):
            packed += length
            if packed >= _PACK:
                self._add_pack(tensors[start:end], packed)
                start, packed = end, 0
        if packed:
            self._add_pack(tensors[start:], packed)

    def _add_pack(self, tensors: list[Tensor], length: int) -> None:
        pack = [tensor if tensor.dim() == 1 else _flatten(tensor) for tensor in tensors]
        missing = -length % _ROW
        if missing:
            pack.append(pack[0].new_zeros(missing))
        joined = torch.cat(pack, out=self._scratch.take(length + missing, self._dtype))
        self._add(joined.view(-1, _ROW))

    def _add(self, rows: Tensor) -> None:
        if self._dtype in _NARROW:
            self._norms.append(_narrow_row_norms(rows, *self._zero_and_one))
        else:
            self._norms.append(torch.linalg.vector_norm(rows, dim=-1).view(-1))


def _narrow_row_norms(rows: Tensor, zero: Tensor, one: Tensor) -> Tensor:
    """Return the float32 norms of 16-bit rows, read once and widened only in registers.

    The only reduction of torch that does this is the gradient of a group norm's weight: the sum, in
    float32, of (output gradient * input), minus the sum of (output gradient * mean). The rows are
    passed as output gradient and as input, with a mean of 0.
    """
    num_rows = len(rows)
    channels, weight = rows.view(1, num_rows, _ROW), zero.new_empty(num_rows)
    squares: Tensor = torch.ops.aten.native_group_norm_backward.default(
        channels, channels, zero, one, weight, 1, num_rows, _ROW, 1, (False, True, False)
    )[1]
    odd = squares.isnan().nonzero().view(-1)  # infinity * mean is NaN
    if len(odd):
        squares[odd] = rows[odd].float().square().sum(1)
    return squares.sqrt_()
