"""The leaves that a rank may write in a save, their copies on the CPU, and their digests.

Tensors of an accelerator are copied through pinned memory, which is kept between saves.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.pieces import is_storable
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu
from mcore.tensor.dtensor import to_local_if_dtensor

DIGEST_BYTES = 8
# Pinned memory cannot be paged out, so a process keeps one buffer for all its saves.
_BUFFER_BYTES = 256 << 20
_PIECE_BYTES = _BUFFER_BYTES // 4  # several, so that the host empties one while another is filled
_ALIGNMENT = 64
PART_BYTES = 1 << 20  # the least size of a part of a tensor that all ranks hold
_EVEN_ROWS = 16  # of a part: with fewer, parts of one row more or less differ much


class CommonValue(NamedTuple):
    """A leaf, or a part of a tensor, that one rank writes for all that have it."""

    key: str
    value: Any
    start: Shape = ()
    shape: Shape | None = None  # of the part, None for all


Candidate = ShardedTensor | ShardedObject | CommonValue
Source = torch.Tensor | Callable[[], bytes]


class Content(NamedTuple):
    """A leaf to write: a plain tensor, or a function that returns the stored bytes."""

    number: int
    key: str
    source: Source


def list_candidates(entries: Entries, size: int = 1) -> list[Candidate]:
    """List the leaves that one of ``size`` ranks may write: shards, objects, then common leaves.

    A large common tensor has a part for each rank. All ranks cut it alike.
    """
    shards = [one for _, one in entries.tensors if is_main_replica(one.replica_id)]
    objects = [one for _, one in entries.objects if is_main_replica(one.replica_id)]
    common: list[CommonValue] = []
    for name, (_, value) in entries.common.items():
        if name in entries.merged:
            continue
        if isinstance(value, torch.Tensor):
            num_parts = min(size, prod(value.shape) * value.dtype.itemsize // PART_BYTES)
            boxes = _cut_boxes(tuple(value.shape), num_parts)
            common += [CommonValue(name, value, *box) for box in boxes]
        else:
            common.append(CommonValue(name, value))
    return [*shards, *objects, *common]


def _cut_boxes(shape: Shape, count: int) -> list[tuple[Shape, Shape]]:
    """Cut a tensor along an axis into parts of about equal size. Each has an offset and a shape."""
    if count < 2:
        return [((0,) * len(shape), shape)]
    longest = max(range(len(shape)), key=shape.__getitem__)
    # The first axis that is long enough, since parts along it are whole runs of memory.
    wide = (axis for axis, length in enumerate(shape) if length >= count * _EVEN_ROWS)
    axis = next(wide, longest)
    ends = [shape[axis] * number // count for number in range(count + 1)]
    before, after = shape[:axis], shape[axis + 1 :]
    return [
        ((0,) * axis + (start,) + (0,) * len(after), (*before, end - start, *after))
        for start, end in pairwise(ends)
        if start < end
    ]


def list_local(leaves: Iterable[Candidate]) -> list[torch.Tensor | None]:
    """Return the local tensors of leaves, None for other leaves and for shards without data."""
    held = [one.data if isinstance(one, ShardedTensor) else one for one in leaves]
    held = [one.value if isinstance(one, CommonValue) else one for one in held]
    return [to_local_if_dtensor(one) if isinstance(one, torch.Tensor) else None for one in held]


def view_box(leaf: Candidate, local: torch.Tensor | None) -> torch.Tensor:
    """Return the part of a leaf's local tensor that is written, as a plain detached tensor."""
    if local is None:
        raise TypeError(f"{leaf.key!r} has no tensor")
    tensor = local.detach().as_subclass(torch.Tensor)
    if isinstance(leaf, ShardedTensor):
        return tensor[(None,) * leaf.prepend_axis_num + (...,)]
    for axis, length in enumerate(getattr(leaf, "shape", None) or ()):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, leaf.start[axis], length)  # type: ignore[union-attr]
    return tensor


def take_contents(
    leaves: Mapping[int, Candidate], *, is_copied: bool, weights_only: bool
) -> Iterator[Content]:
    """Yield leaves as they are written, by their numbers, and values before tensors.

    ``is_copied`` copies each, or starts to copy it, to the CPU.
    """
    tensors = dict(zip(leaves, list_local(leaves.values()), strict=True))
    for number in sorted(leaves, key=lambda number: tensors[number] is not None):
        leaf, local = leaves[number], tensors[number]
        if local is not None:
            tensor = view_box(leaf, local)
            yield Content(number, leaf.key, start_host_copy(tensor) if is_copied else tensor)
            continue
        if isinstance(leaf, ShardedObject):
            key, encode = leaf.unique_key, partial(leaf.encode, weights_only=weights_only)
        else:
            # A tensor without data was refused.
            key, value = leaf.key, leaf.value  # type: ignore[union-attr]
            encode = partial(serialize, key, value, weights_only=weights_only)
        yield Content(number, key, partial(bytes, encode()) if is_copied else encode)


def reject_unsavable(leaves: Iterable[Candidate], kind: type[Candidate]) -> None:
    """Raise CheckpointingException for tensors of one kind of leaf that cannot be written."""
    problems = []
    meant = [leaf for leaf in leaves if isinstance(leaf, kind)]
    for leaf, local in zip(meant, list_local(meant), strict=True):
        is_shard = isinstance(leaf, ShardedTensor) and prod(leaf.local_shape) > 0
        is_written = is_shard or isinstance(getattr(leaf, "value", None), torch.Tensor)
        if is_written and (text := data_problem(local)):
            problems.append(f"{leaf.key!r} {text}")
    if problems:
        raise CheckpointingException(titled_list("some tensors cannot be saved", problems))


def data_problem(data: torch.Tensor | None) -> str | None:
    """Return why a local tensor cannot be written, or None."""
    if data is None:
        return "has no data: its ShardedTensor is only a description"
    if data.is_meta:
        return "is on the meta device: materialise it first"
    if data.layout != torch.strided:
        return f"has layout {data.layout}: make it dense"
    if data.is_quantized:
        return f"has dtype {data.dtype}, which needs code to be loaded: dequantize it"
    if not is_storable(data.dtype):
        return f"has dtype {data.dtype}, which torch.save does not know: save view(torch.uint8)"
    if type(data).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {type(data).__qualname__}, which is not plain memory: save its plain tensors "
            "instead"
        )
    return None


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds."""
    hasher = xxhash.xxh3_64(f"<{type(value).__name__}>".encode())
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if hasattr(value, "__tensor_flatten__"):  # a subclass that consists of tensors
            for name in value.__tensor_flatten__()[0]:
                hasher.update(digest_of(getattr(value, name)))
        elif not value.is_meta:
            hasher.update(memory_of(row_major_on_cpu(value)))
    elif isinstance(value, Mapping | set | frozenset | list | tuple):
        parts = list(map(digest_of, value.items() if isinstance(value, Mapping) else value))
        hasher.update(b"".join(parts if isinstance(value, list | tuple) else sorted(parts)))
    elif isinstance(value, bytes | bytearray):
        hasher.update(bytes(value))
    elif value is None or isinstance(value, bool | int | float | complex | str):
        hasher.update(repr(value).encode())
    else:
        hasher.update(pickle.dumps(value))
    return hasher.digest()


def digest_shards(leaves: Collection[Candidate]) -> bytes:
    """Return the digests of shards with data, one after the other."""
    tensors = [view_box(*one) for one in zip(leaves, list_local(leaves), strict=True)]
    return b"".join(map(digest_of, tensors))


class _Piece(NamedTuple):
    """A copy that was started: from the device to ``pinned``, later from there to ``target``."""

    start: int
    pinned: torch.Tensor
    target: torch.Tensor
    arrived: torch.Event


class _PinnedRing:
    """A pinned buffer that is filled in a circle and emptied in that order. For any thread."""

    def __init__(self, capacity: int, piece_bytes: int) -> None:
        self._capacity, self._piece_bytes = capacity, piece_bytes
        self._lock = threading.RLock()
        self._buffer: torch.Tensor | None = None
        self._end = 0  # of the piece that was started last
        self.num_started = 0
        self._pieces: deque[_Piece] = deque()
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, source: torch.Tensor) -> torch.Tensor:
        """Start copying a contiguous tensor. Waits for the device only to reuse pinned memory."""
        copy = torch.empty_like(source, device="cpu")
        flat, target = (tensor.view(-1).view(torch.uint8) for tensor in (source, copy))
        current = torch.accelerator.current_stream(source.device)
        with self._lock:
            side = self._streams.get(source.device) or torch.Stream(source.device)
            self._streams[source.device] = side
            side.wait_stream(current)
            with side:
                for start in range(0, flat.numel(), self._piece_bytes):
                    end = start + self._piece_bytes
                    self._start_piece(flat[start:end], target[start:end])
            current.wait_stream(side)
        return copy

    def finish(self, number: int) -> None:
        """Wait for the first pieces that were started, up to a number of ``num_started``."""
        with self._lock:
            while self._pieces and self.num_started - len(self._pieces) < number:
                self._empty_oldest()

    def _start_piece(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(
                self._capacity, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if start + source.numel() > self._capacity:
            while self._pieces and self._pieces[0].start >= start:
                self._empty_oldest()
            start = 0
        self._end = start + source.numel()
        while self._pieces and start <= self._pieces[0].start < self._end:
            self._empty_oldest()
        pinned = self._buffer[start : self._end].copy_(source, non_blocking=True)
        arrived = torch.Event(source.device)
        arrived.record()
        self._pieces.append(_Piece(start, pinned, target, arrived))
        self.num_started += 1

    def _empty_oldest(self) -> None:
        piece = self._pieces.popleft()
        piece.arrived.synchronize()
        piece.target.copy_(piece.pinned)


_ring = _PinnedRing(_BUFFER_BYTES, _PIECE_BYTES)


def start_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, which is complete after a wait for :func:`host_copies_so_far`.

    Later work on the current stream waits for the copy, so the tensor may be changed at once.
    """
    if tensor.is_cpu:
        return tensor.detach().to("cpu", copy=True)
    return _ring.start(tensor.detach().resolve_conj().resolve_neg().contiguous())


def start_content(source: Source) -> Callable[[], torch.Tensor | bytes]:
    """Start copying a content to the CPU. The returned function waits for it.

    It returns stored bytes, or a contiguous tensor that is alone in its storage.
    """
    if not isinstance(source, torch.Tensor):
        return source
    plain = source.resolve_conj().resolve_neg().contiguous()
    if not plain.is_cpu:
        plain = start_host_copy(plain)
    elif plain.nbytes and plain.untyped_storage().nbytes() != plain.nbytes:
        # torch.save writes whole storages, so a view becomes a storage of its size, not copied.
        alone = torch.frombuffer(memory_of(plain), dtype=torch.uint8)
        plain = alone.view(plain.dtype).view(plain.shape)
    number = _ring.num_started

    def finish() -> torch.Tensor:
        _ring.finish(number)  # an asynchronous save has started the copy earlier
        return plain

    return finish
