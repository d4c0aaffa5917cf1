"""L2 norms of many tensors that share one device and one dtype.

On the CPU an operation costs as much as thousands of additions, and a float32 sum over millions of
squares is off in the third digit: small tensors are packed, long ones are summed in short rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mcore.tensor.multi_tensor.scaling import Scratch

_SMALL = 1 << 12  # elements up to which packing a tensor costs less than an operation on it
_SMALL_NARROW = 1 << 15  # the same for 16-bit tensors, which have to be widened as well
_LONG = 1 << 15  # elements from which the error of one float32 sum nears 1e-6
_ROW = 1 << 10  # elements of a long tensor that are summed at once, with an error below 1e-7
_PACK = 1 << 19  # elements packed together: they stay in the cache
_BLOCK = 1 << 20  # elements widened together
_MANY = 4  # small tensors of one length from which they are worth packing


def norms_of_pieces(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """Return norms, float32 or wider, of disjoint pieces that together are all the tensors."""
    if tensors[0].device.type != "cpu":
        return _norms_of_each(tensors)
    workspace = _Workspace(tensors[0].dtype, sum(lengths))
    longest_small = workspace.longest_small
    norms: list[Tensor] = []
    medium: list[Tensor] = []
    pack: list[Tensor] = []
    packed = 0
    for tensor, length in zip(tensors, lengths, strict=True):
        if length >= _LONG:
            row_norms, rest = workspace.row_norms(tensor)
            norms += row_norms
            if rest is not None:
                pack.append(rest)
                packed += rest.numel()
        elif length > longest_small:
            medium.append(_contiguous(tensor))
        else:
            pack.append(tensor if tensor.dim() == 1 else _flattened(tensor))
            packed += length
        if packed >= _PACK:
            norms.append(workspace.pack_norms(pack, packed))
            pack, packed = [], 0
    if packed:
        norms.append(workspace.pack_norms(pack, packed))
    if medium:
        norms.append(_norms_of_each(medium))
    return torch.cat(norms)


def norms_of_tensors(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """Return the norm of each tensor in their order, float32 or wider."""
    if tensors[0].device.type != "cpu":
        return _norms_of_each(tensors)
    workspace = _Workspace(tensors[0].dtype, sum(lengths))
    order: list[int] = []
    norms: list[Tensor] = []
    one_by_one: list[int] = []
    members_by_length = _indices_by_length(lengths)
    for length, members in members_by_length.items():
        if length >= _LONG:
            norms += [_norm_of_long(tensors[index], workspace) for index in members]
        elif length <= workspace.longest_small and len(members) >= _MANY:
            norms += _norms_of_equals([tensors[index] for index in members], length, workspace)
        else:
            one_by_one += members
            continue
        order += members
    if one_by_one:
        norms.append(_norms_of_each([_contiguous(tensors[index]) for index in one_by_one]))
        order += one_by_one
    unordered = torch.cat(norms)
    if 1 in members_by_length:
        unordered = unordered.square().sqrt()  # of one element torch skips the square: it overflows
    return torch.empty_like(unordered).index_copy_(0, torch.tensor(order), unordered)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norms_of_each(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=_wide(tensors[0].dtype)))


def _flattened(tensor: Tensor) -> Tensor:
    """Return the elements in any order in one dimension, without a copy if they are dense."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.reshape(-1)


def _contiguous(tensor: Tensor) -> Tensor:
    """Return the elements in any order, where a sum over them is fast and exact."""
    return tensor if tensor.is_contiguous() else _flattened(tensor).contiguous()


class _Workspace:
    """Norms of rows, with the memory that packing and widening need, which is allocated once."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self._dtype = dtype
        self._wide = _wide(dtype)
        self._scratch = Scratch(min(length, _BLOCK) + _ROW)
        self.longest_small = _SMALL if dtype == self._wide else _SMALL_NARROW

    def norms_of_rows(self, rows: Tensor) -> Tensor:
        if self._dtype != self._wide:
            rows = self._scratch.take(rows.numel(), self._wide).view(rows.shape).copy_(rows)
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms

    def joined(self, tensors: list[Tensor], length: int) -> Tensor:
        return torch.cat(tensors, out=self._scratch.take(length, self._dtype))

    def pack_norms(self, tensors: list[Tensor], length: int) -> Tensor:
        """Return the norms of the short rows of everything together; zeros pad the last row."""
        missing = -length % _ROW
        fill = tensors[0].new_zeros(missing)
        return self.norms_of_rows(self.joined([*tensors, fill], length + missing).view(-1, _ROW))

    def row_norms(self, tensor: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return the norms of a long tensor's short rows, and the elements that fill no row."""
        dense = _contiguous(tensor)
        num_rows, num_left = divmod(dense.numel(), _ROW)
        rows = dense.as_strided((num_rows, _ROW), (_ROW, 1))
        rest = None
        if num_left:
            rest = dense.as_strided((num_left,), (1,), dense.storage_offset() + num_rows * _ROW)
        widens = self._dtype != self._wide
        blocks: Iterable[Tensor] = torch.split(rows, _BLOCK // _ROW) if widens else [rows]
        return [self.norms_of_rows(block) for block in blocks], rest


def _norm_of_long(tensor: Tensor, workspace: _Workspace) -> Tensor:
    norms, rest = workspace.row_norms(tensor)
    if rest is not None:
        norms.append(workspace.norms_of_rows(rest[None]))
    return torch.cat(norms).square().sum().sqrt()[None]


def _norms_of_equals(tensors: list[Tensor], length: int, workspace: _Workspace) -> Iterator[Tensor]:
    num_together = max(1, _PACK // length)
    for start in range(0, len(tensors), num_together):
        flat = [
            tensor if tensor.dim() == 1 else _flattened(tensor)
            for tensor in tensors[start : start + num_together]
        ]
        joined = workspace.joined(flat, len(flat) * length)
        yield workspace.norms_of_rows(joined.view(len(flat), length))


def _indices_by_length(lengths: list[int]) -> dict[int, list[int]]:
    indices: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        indices.setdefault(length, []).append(index)
    return indices
