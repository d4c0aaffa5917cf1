"""Slices of a batch for the ranks of a context-parallel group, balanced for causal attention.

A sequence is cut into ``2 * cp`` equal chunks. Rank r gets the chunks r and ``2 * cp - 1 - r``.
A causal query at position p attends to p + 1 keys, so both chunks together cost the same on every
rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore.parallel.groups import AnyGroup, get_pg_rank, get_pg_size
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.shortened import counted
from mcore.parallel.torch_compat import is_distributed
from mcore.tensor.dtensor import is_dtensor

METADATA_KEYS = frozenset(
    {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group"}
)
PACKED_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_USUAL_DIMS = {"attention_mask": -2, "position_ids": -1}  # with three dims or more
_PACKED_MARK = "_mcore_is_packed_cp_shard"


def get_batch_on_this_cp_rank(
    batch: dict[str, Any],
    cp_group: AnyGroup | None = None,
    *,
    is_hybrid_cp: bool = False,
    hybrid_cp_group_func: Callable[..., Any] | None = None,
    use_per_sequence_balancing: bool = False,
    seq_dims: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Return the part of a batch for this rank of the context-parallel group.

    No communication. A batch is split in one of three modes, all by the two-chunk scheme of this
    module:

    - Per sequence, if the batch has no ``cu_seqlens`` or with ``use_per_sequence_balancing``. Each
      tensor is split along its sequence dim. All have the same length and, unless ``seq_dims``
      names them, the same number of rows or one row.
    - Packed, if the batch has ``cu_seqlens``. Every document is split, which keeps each balanced,
      for the keys ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` and those in
      ``seq_dims``.
    - Hybrid, if the batch has ``cu_seqlens`` and with ``is_hybrid_cp``. The batch is split per
      sequence over a group chosen for this batch, stored in the result as ``hybrid_cp_group``.

    Tensors to split are checked before any is copied. ``None``, values of other keys that are
    not tensors, and the keys ``cu_seqlens``, ``cu_seqlens_padded``, ``max_seqlen``,
    ``local_cp_size`` and ``hybrid_cp_group`` pass through unchanged, with the lengths of the whole
    sequence.

    Args:
        batch: Tensors by name, ``[b, s]`` or ``[b, s, ...]``. An ``attention_mask`` is ``[b, s]``,
            ``[b, 1, sq, sk]`` or ``[b, sq, sk]``, with the query dim sq split. ``position_ids`` of
            several axes are ``[axes, b, s]``. Packed batches have the borders of the documents in
            ``cu_seqlens``, ``[n]`` or ``[1, n]``. ``cu_seqlens_padded`` is used instead if present.
            Hybrid batches have ``local_cp_size``, an int or a tensor of one element. A
            ``cu_seqlens`` or ``local_cp_size`` on an accelerator is read with one host sync.
        cp_group: Context-parallel group or 1-D DeviceMesh of cp ranks. Default ``cp`` of the
            default ``ProcessGroups``, else one rank.
        is_hybrid_cp: The ``local_cp_size`` of a batch with ``cu_seqlens`` is the number of ranks
            that share it. A batch without ``cu_seqlens`` is split over ``cp_group``, as in
            Megatron-LM.
        hybrid_cp_group_func: Called as ``hybrid_cp_group_func(group_size=n)`` for the group of the
            n ranks that share a hybrid batch. Needed when n > 1.
        use_per_sequence_balancing: Split per sequence even if there is a ``cu_seqlens``.
        seq_dims: Sequence dim by key. The default is dim 1, but with three or more dims the last
            but one of an ``attention_mask`` and the last of ``position_ids``. ``None`` lets the key
            pass through. A key that usually passes through is split if it is named here.

    Returns:
        A new dict with the same keys. Split tensors are new, contiguous, ``1 / cp`` as long in the
        sequence dim and differentiable. With one rank, with a ``local_cp_size`` of 1, and if
        torch.distributed is not initialised: a shallow copy.

    Raises:
        TypeError: ``cp_group`` is a bool, a tensor to split is a DTensor, or a value of the four
            packed keys or in ``seq_dims`` is neither a tensor nor None.
        ValueError: A length is not divisible by ``2 * cp``, lengths or rows differ, a tensor lacks
            its sequence dim, ``cu_seqlens`` does not describe the sequence, a packed batch has an
            attention mask, a hybrid batch lacks ``local_cp_size`` or its group, or this rank is not
            in the group.

    Example:
        >>> batch = {"tokens": torch.arange(8)[None], "labels": None}
        >>> part = get_batch_on_this_cp_rank(batch)
        >>> part["tokens"] is batch["tokens"], part is batch
        (True, False)
    """
    if isinstance(cp_group, bool):
        raise TypeError(
            "got a bool as cp_group: pass is_hybrid_cp by keyword, "
            f"get_batch_on_this_cp_rank(batch, is_hybrid_cp={cp_group})"
        )
    dims = dict(seq_dims or {})
    has_documents = batch.get("cu_seqlens") is not None and not use_per_sequence_balancing
    if is_hybrid_cp and has_documents:
        return _split_hybrid(batch, hybrid_cp_group_func, dims)
    member = group_of_several(cp_group, "cp")
    if member is None:
        return dict(batch)
    size, rank = member.size(), member.rank()
    if has_documents:
        return _split_packed(batch, size, rank, dims)
    return _split_per_sequence(batch, size, rank, dims)


def cp_zigzag_index(
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of a sequence that one context-parallel rank has, in its order.

    Args:
        seq_len: Length of the whole sequence.
        cp_size: Number of context-parallel ranks, cp.
        cp_rank: The rank, 0 to cp - 1.
        cu_seqlens: Borders of the documents packed into the sequence, ``[n]`` or ``[1, n]``, from 0
            to ``seq_len``. Each document is then balanced separately. On an accelerator it is read
            with one host sync.
        device: Device of the result. Default the CPU.

    Returns:
        int64 tensor ``[seq_len / cp]``.

    Raises:
        ValueError: ``cp_rank`` is not below ``cp_size``, the sequence or a document is not
            divisible by ``2 * cp``, or ``cu_seqlens`` does not describe the sequence. With one rank
            any length is valid.

    Example:
        >>> cp_zigzag_index(16, 2, 0).tolist()
        [0, 1, 2, 3, 12, 13, 14, 15]
        >>> cp_zigzag_index(16, 2, 1, cu_seqlens=[0, 4, 16]).tolist()
        [1, 2, 7, 8, 9, 10, 11, 12]
    """
    if cp_size < 1:
        raise ValueError(f"cp_size is {cp_size}, expected 1 or more")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(
            f"cp_rank is {cp_rank}, expected 0 to {cp_size - 1} with cp_size {cp_size}"
        )
    if seq_len < 0:
        raise ValueError(f"seq_len is {seq_len}, expected 0 or more")
    borders = read_borders([0, seq_len] if cu_seqlens is None else cu_seqlens)
    check_length(borders, seq_len, "the sequence")
    if cp_size == 1:
        return torch.arange(seq_len, device=device or "cpu")
    check_divisible(borders, cp_size)
    return zigzag_positions(borders, cp_size, cp_rank).to(device or "cpu")


def cp_unzigzag(
    shards: Sequence[Tensor],
    dim: int,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    local_cp_size: int | Tensor | None = None,
) -> Tensor:
    """Put the shards of all context-parallel ranks back into the order of the sequence.

    The inverse of each split of :func:`get_batch_on_this_cp_rank`. No communication.
    Differentiable, e.g. after gathering keys along dim 0: ``cp_unzigzag(gathered.chunk(cp), 0)``.

    Args:
        shards: One tensor of equal shape for each rank, in rank order. For a hybrid batch, one for
            each rank of its ``hybrid_cp_group``.
        dim: The sequence dim of the shards.
        cu_seqlens: For a packed batch, the borders by which its documents were split, so its
            ``cu_seqlens_padded`` if it has one. ``[n]`` or ``[1, n]``, read as in
            :func:`cp_zigzag_index`. None for whole sequences and hybrid batches.
        local_cp_size: The value of a hybrid batch, to check the number of shards.

    Returns:
        A new tensor, cp times as long in ``dim``. A single shard is returned as it is.

    Raises:
        ValueError: There are no shards, or they have different shapes, no ``dim``, an odd length or
            another number than ``local_cp_size``. Or ``cu_seqlens`` does not describe the shards,
            or it is missing though they are results of the split of a packed batch. Tensors
            computed from such shards are not recognised.

    Example:
        >>> shards = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
        >>> cp_unzigzag(shards, dim=0)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        >>> shards = [torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5, 6])]
        >>> cp_unzigzag(shards, dim=0, cu_seqlens=[0, 4, 8])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if len(shards) == 0:
        raise ValueError("got no shards, expected one shard for each context-parallel rank")
    if local_cp_size is not None and len(shards) != _read_local_cp_size(local_cp_size):
        raise ValueError(
            f"got {counted(len(shards), 'shard')} with a local_cp_size of "
            f"{_read_local_cp_size(local_cp_size)}: pass the shards of the ranks of hybrid_cp_group"
        )
    shapes = [tuple(shard.shape) for shard in shards]
    if len(set(shapes)) > 1:
        raise ValueError(f"the shards of all ranks must have one shape, got {shapes}")
    if not -len(shapes[0]) <= dim < len(shapes[0]):
        raise ValueError(f"shards of shape {shapes[0]} have no dim {dim}")
    size = len(shards)
    if cu_seqlens is not None:
        borders = read_borders(cu_seqlens)
        check_length(borders, size * shapes[0][dim], counted(size, "shard"))
        if size > 1:
            check_divisible(borders, size)
            places = torch.cat([zigzag_positions(borders, size, rank) for rank in range(size)])
            order = places.argsort().to(shards[0].device)  # inverts the permutation
            return torch.cat(list(shards), dim).index_select(dim, order)
    if size == 1:
        return shards[0]
    if any(hasattr(shard, _PACKED_MARK) for shard in shards):
        raise ValueError(
            "the shards are of packed documents, which were split one by one: pass their "
            "cu_seqlens (cu_seqlens_padded if the batch has it)"
        )
    length = shapes[0][dim]
    if length % 2:
        raise ValueError(
            f"shards of shape {shapes[0]} have odd length {length} in dim {dim}: each must hold "
            "two chunks of equal length"
        )
    ascending = [shard.narrow(dim, 0, length // 2) for shard in shards]
    descending = [shard.narrow(dim, length // 2, length // 2) for shard in reversed(shards)]
    return torch.cat(ascending + descending, dim)


def _split_per_sequence(
    batch: dict[str, Any], size: int, rank: int, seq_dims: dict[str, int | None]
) -> dict[str, Any]:
    names = [name for name in batch if name not in METADATA_KEYS or name in seq_dims]
    dims = _find_dims_to_split(batch, names, seq_dims)
    if not dims:
        return dict(batch)
    num_chunks = 2 * size
    _check_one_length(batch, dims, seq_dims, num_chunks)
    parts = dict(batch)
    device = numbers = None
    for name, dim in dims.items():
        tensor = batch[name]
        if numbers is None or tensor.device != device:
            device = tensor.device
            # The two chunk numbers of this rank, made on the device to avoid a copy to it.
            last = num_chunks - 1 - rank
            numbers = torch.arange(rank, last + 1, last - rank, device=device)
        parts[name] = _take_two_chunks(tensor, dim, num_chunks, numbers)
    return parts


def _check_one_length(
    batch: dict[str, Any], dims: dict[str, int], seq_dims: dict[str, int | None], num_chunks: int
) -> None:
    """Raise ValueError unless the tensors are slices of the same rows of one sequence length."""
    first = "tokens" if "tokens" in dims else next(iter(dims))
    length = batch[first].shape[dims[first]]
    if length % num_chunks:
        raise ValueError(
            f"{first} of shape {tuple(batch[first].shape)} has length {length} in dim "
            f"{dims[first]}, not divisible by {num_chunks} (2 * context-parallel size "
            f"{num_chunks // 2}): pad it"
        )
    rows: dict[int, str] = {}
    for name, dim in dims.items():
        shape = batch[name].shape
        if shape[dim] != length:
            raise ValueError(
                f"{name} of shape {tuple(shape)} has length {shape[dim]} in dim {dim}, {first} of "
                f"shape {tuple(batch[first].shape)} {length} in dim {dims[first]}: name the "
                f"sequence dim in seq_dims, or let a key pass with seq_dims={{{name!r}: None}}"
            )
        if name not in seq_dims:
            rows.setdefault(shape[dim - 1 if dim == len(shape) - 1 else 0], name)
    rows.pop(1, None)
    if len(rows) > 1:
        [(expected, first), (number, name)] = list(rows.items())[:2]
        raise ValueError(
            f"{name} of shape {tuple(batch[name].shape)} has {counted(number, 'row')}, {first} of "
            f"shape {tuple(batch[first].shape)} {expected}, so dim {dims[name]} may not be "
            f"the sequence: name it in seq_dims, or let the key pass with {{{name!r}: None}}"
        )


def _take_two_chunks(tensor: Tensor, dim: int, num_chunks: int, numbers: Tensor) -> Tensor:
    if dim == 1 and tensor.dim() == 2:  # the usual case, a third faster this way
        rows, columns = tensor.shape
        length = columns // num_chunks
        return tensor.view(rows, num_chunks, length).index_select(1, numbers).view(rows, 2 * length)
    length = tensor.shape[dim] // num_chunks
    chunks: Tensor = tensor.unflatten(dim, (num_chunks, length))  # type: ignore[no-untyped-call]
    return chunks.index_select(dim, numbers).flatten(dim, dim + 1)


def _split_packed(
    batch: dict[str, Any], size: int, rank: int, seq_dims: dict[str, int | None]
) -> dict[str, Any]:
    if batch.get("attention_mask") is not None:
        raise ValueError(
            "a batch with cu_seqlens must not have an attention_mask (the documents define it), "
            f"got a {type(batch['attention_mask']).__name__}: set it to None"
        )
    names = [name for name in batch if name in PACKED_KEYS or name in seq_dims]
    dims = _find_dims_to_split(batch, names, seq_dims)
    if not dims:
        return dict(batch)
    padded = batch.get("cu_seqlens_padded")
    borders = read_borders(batch["cu_seqlens"] if padded is None else padded)
    for name, dim in dims.items():
        shape = tuple(batch[name].shape)
        check_length(borders, shape[dim], f"dim {dim} of {name} with shape {shape}")
    check_divisible(borders, size)
    positions = zigzag_positions(borders, size, rank)
    devices = {batch[name].device for name in dims}
    indices = {device: positions.to(device, non_blocking=True) for device in devices}
    parts = {n: batch[n].index_select(dim, indices[batch[n].device]) for n, dim in dims.items()}
    for part in parts.values():
        setattr(part, _PACKED_MARK, True)
    return {**batch, **parts}


def _split_hybrid(
    batch: dict[str, Any], group_func: Callable[..., Any] | None, seq_dims: dict[str, int | None]
) -> dict[str, Any]:
    size = _read_local_cp_size(batch.get("local_cp_size"))
    if size == 1:
        return dict(batch)
    if group_func is None:
        raise ValueError(
            f"is_hybrid_cp with a local_cp_size of {size} needs hybrid_cp_group_func, called as "
            f"hybrid_cp_group_func(group_size={size})"
        )
    if not is_distributed():
        return dict(batch)
    group = group_func(group_size=size)
    if get_pg_size(group) != size:
        raise ValueError(
            f"hybrid_cp_group_func(group_size={size}) returned a group of {get_pg_size(group)}"
        )
    part = _split_per_sequence(batch, size, get_pg_rank(group), seq_dims)
    return {**part, "hybrid_cp_group": group}


def _read_local_cp_size(value: Any) -> int:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"is_hybrid_cp needs batch['local_cp_size'], an int or a tensor of one int, at least "
            f"1, got {value!r}"
        )
    return size


def _find_dims_to_split(
    batch: dict[str, Any], names: Sequence[str], seq_dims: dict[str, int | None]
) -> dict[str, int]:
    """Return the non-negative sequence dim of each tensor among the names."""
    dims = {}
    for name in names:
        tensor = batch[name]
        if not isinstance(tensor, Tensor):
            is_sequence = tensor is not None and name in (*PACKED_KEYS, *seq_dims)
            if is_sequence and seq_dims.get(name, 1) is not None:
                raise TypeError(
                    f"{name} is a {type(tensor).__name__}, which every rank would get whole: pass "
                    f"a tensor, or let it pass with seq_dims={{{name!r}: None}}"
                )
            continue
        dim = seq_dims.get(name, _USUAL_DIMS.get(name, 1) if tensor.dim() > 2 else 1)
        if dim is None:
            continue
        if is_dtensor(tensor):
            raise TypeError(f"{name} is a DTensor, which cannot be split: pass its local tensor")
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has no dim {dim} to split: name its "
                f"sequence dim in seq_dims, or let it pass with seq_dims={{{name!r}: None}}"
            )
        dims[name] = dim % tensor.dim()
    return dims


def read_borders(cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Return the borders of packed documents, ``[n]`` or ``[1, n]``, as int64 on the CPU."""
    borders = cu_seqlens
    if not isinstance(borders, Tensor):
        borders = torch.as_tensor(borders, device="cpu")
    shape = tuple(borders.shape)
    if len(shape) == 2 and shape[0] > 1:
        raise ValueError(
            f"cu_seqlens of shape {shape} has {shape[0]} rows, expected one: flatten the "
            "micro-batch first, with flatten_batch_for_packed_sequences(batch)"
        )
    if len(shape) not in (1, 2):
        raise ValueError(f"cu_seqlens must be [n] or [1, n], got shape {shape}")
    if borders.numel() and (borders.is_floating_point() or borders.is_complex()):
        raise ValueError(f"cu_seqlens must hold integers, got {borders.dtype}")
    borders = borders.flatten().to("cpu", torch.int64)
    if not borders.numel() or borders[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {borders.tolist()}")
    if (borders.diff() < 0).any():
        raise ValueError(f"cu_seqlens must not decrease, got {borders.tolist()}")
    return borders


def check_length(borders: Tensor, length: int, name: str) -> None:
    """Raise ValueError unless the documents fill a sequence of this length."""
    end = int(borders[-1])
    if end != length:
        raise ValueError(f"cu_seqlens ends at {end}, expected {length}, the length of {name}")


def check_divisible(borders: Tensor, cp_size: int) -> None:
    """Raise ValueError unless every document can be cut into ``2 * cp_size`` equal chunks."""
    uneven = (borders.diff() % (2 * cp_size)).nonzero().flatten().tolist()
    if uneven:
        start, end = borders[uneven[0] : uneven[0] + 2].tolist()
        raise ValueError(
            f"document {uneven[0]} [{start}, {end}) has length {end - start}, not divisible by "
            f"{2 * cp_size} (2 * context-parallel size {cp_size}): pad it. {len(uneven)} of "
            f"{counted(len(borders) - 1, 'document')} cannot be split"
        )


def zigzag_positions(borders: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of one rank: the chunks r and ``2 * cp - 1 - r`` of every document."""
    # Position = index in the result + shift, with one shift for each of a document's two chunks.
    starts, chunks = borders[:-1], borders.diff() // (2 * cp_size)
    firsts = starts + cp_rank * chunks
    seconds = starts + (2 * cp_size - 1 - cp_rank) * chunks
    lengths = chunks.repeat_interleave(2)
    places = lengths.cumsum(0) - lengths
    shifts = torch.stack((firsts, seconds), dim=1).flatten() - places
    return torch.arange(int(lengths.sum()), device="cpu") + shifts.repeat_interleave(lengths)
