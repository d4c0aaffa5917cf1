"""A rank's shard of a tensor: its place in the global tensor, and the number of its replica."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, SupportsIndex, TypeVar

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.tensor.dtensor import to_local_if_dtensor

_Entry = TypeVar("_Entry", bound="LocalEntry")
ReplicaId = int | tuple[int, ...]
Shape = tuple[int, ...]
StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this replica of a shard is written.

    Args:
        replica_id: An integer (numpy integers too) or a tuple of integers.

    Returns:
        True for 0 or all zeros.

    Example:
        >>> is_main_replica((0, 0, 0)), is_main_replica((0, 1, 0)), is_main_replica(0)
        (True, False, True)
    """
    numbers = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    return all(index(number) == 0 for number in numbers)


def as_shape(numbers: Iterable[int]) -> Shape:
    """Return integers of any kind, also of numpy, as a plain tuple."""
    return tuple(map(index, numbers))


class LocalEntry:
    """An entry that a save of this package understands. It can be copied, but not pickled.

    A saver without support for it would pickle it on one rank and report success: the checkpoint
    would have this rank's shard for the whole.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if getattr(self, "data", self) is None:  # a description
            return super().__reduce_ex__(protocol)
        raise pickle.PicklingError(
            f"cannot pickle the {type(self).__name__} {getattr(self, 'key', '')!r}: a checkpoint "
            "would keep the part of one rank. Save the state dict with "
            "mcore.parallel.checkpoint.save_sharded_state_dict(...). For dist_checkpointing of "
            "Megatron-LM, convert it with mcore.modules.to_megatron_sharded_state_dict(...)"
        )

    def __copy__(self: _Entry) -> _Entry:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self: _Entry, memo: dict[int, Any]) -> _Entry:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class ShardedBase(LocalEntry):
    """The base of :class:`ShardedTensor` and :class:`ShardedObject`, for isinstance.

    Attributes:
        key: Name in the checkpoint.
        data: This rank's shard.
        replica_id: Number of this replica. The replica with all zeros is written.
    """

    key: str
    data: Any
    replica_id: ReplicaId


@dataclass
class ShardedTensor(ShardedBase):
    """A rank's shard of a global tensor: a box of it.

    Axes prepended to the tensor (of stacked layers) are the first in ``global_shape`` and
    ``global_offset`` and are not part of ``local_shape``. ``==`` compares the descriptions, not
    ``data``.

    Attributes:
        key: Name in the checkpoint. A rank may hold several shards of one key.
        data: The local tensor or a DTensor. None in a description without data.
        dtype: The dtype of the tensor.
        local_shape: Shape of this rank's shard, in elements.
        global_shape: Shape of the whole tensor, prepended axes first.
        global_offset: The start of this shard in the global tensor.
        axis_fragmentations: Number of equal shards along each global axis. None if the shards are
            not a regular grid.
        replica_id: ``(pp, tp, dp)``-style number of the replica. All zeros is written.
        prepend_axis_num: Number of prepended axes.
        allow_shape_mismatch: If the global shape in the checkpoint differs (padded vocabulary), a
            load reads the overlap and zeroes the rest.
        flattened_range: Always None: a shard is a box.

    Raises:
        CheckpointingException: The numbers contradict each other or ``data``.

    Example:
        >>> ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), (0, 1, 2)).global_offset
        (4, 0)
    """

    key: str
    data: torch.Tensor | None = field(repr=False, compare=False)
    dtype: torch.dtype
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    axis_fragmentations: Shape | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: None = None

    def __post_init__(self) -> None:
        is_whole = self.global_shape is self.local_shape
        self.local_shape = as_shape(self.local_shape)
        # Most tensors are whole: one shape for both saves a tenth of the time.
        self.global_shape = self.local_shape if is_whole else as_shape(self.global_shape)
        self.global_offset = as_shape(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = as_shape(self.axis_fragmentations)
        self.validate_metadata_integrity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: Sequence[int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describe a shard of a regular grid by its place along each cut axis.

        No communication.

        Args:
            key: Name in the checkpoint.
            data: This rank's shard. All shards have its shape.
            rank_offsets: ``(axis, index, count)`` each: this is shard ``index`` of ``count`` along
                ``axis``, counted with the prepended axes. Other axes are not cut.
            replica_id: Number of the replica.
            prepend_axis_num: The number of leading axes that exist only in the global tensor.
            init_kwargs: Further fields, such as ``allow_shape_mismatch``.

        Returns:
            The description. Its ``data`` is ``data`` itself, not a copy.

        Raises:
            CheckpointingException: An axis outside the tensor or named twice, an index outside
                ``[0, count)`` or a count below 1.

        Example:
            >>> shard = ShardedTensor.from_rank_offsets(
            ...     "w", torch.zeros(4, 6), (0, 1, 3), (1, 1, 2), prepend_axis_num=1
            ... )
            >>> shard.global_shape, shard.global_offset
            ((3, 8, 6), (1, 4, 0))
        """
        local_shape = tuple(data.shape)
        sizes = (1,) * prepend_axis_num + local_shape
        ndim = len(sizes)
        global_shape, global_offset, axis_fragmentations = sizes, (0,) * ndim, (1,) * ndim
        places = _check_offsets(key, rank_offsets, ndim) if rank_offsets else {}
        for axis, (place, count) in places.items():
            global_shape = _replace_entry(global_shape, axis, sizes[axis] * count)
            global_offset = _replace_entry(global_offset, axis, sizes[axis] * place)
            axis_fragmentations = _replace_entry(axis_fragmentations, axis, count)
        return cls(
            key,
            data,
            data.dtype,
            local_shape,
            global_shape,
            global_offset,
            axis_fragmentations,
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @property
    def has_regular_grid(self) -> bool:
        """Whether all shards have the shape of this one."""
        return self.axis_fragmentations is not None

    @property
    def shard_shape(self) -> Shape:
        """``local_shape`` with a leading 1 for each prepended axis."""
        return (1,) * self.prepend_axis_num + self.local_shape

    def local_chunk_offset_in_global(self) -> Shape:
        """Return this shard's place in the grid of shards.

        Returns:
            One index per global axis. 0 along an axis without elements in the shard.

        Raises:
            CheckpointingException: The shards are not a regular grid.

        Example:
            >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), (0, 1, 2))
            >>> shard.local_chunk_offset_in_global()
            (1, 0)
        """
        if not self.has_regular_grid:
            raise CheckpointingException(
                f"key {self.key!r}: the shards have different shapes (axis_fragmentations is "
                "None), so a shard has no index in a grid. Use global_offset"
            )
        return tuple(
            offset // size if size else 0
            for offset, size in zip(self.global_offset, self.shard_shape, strict=True)
        )

    def without_data(self) -> ShardedTensor:
        """Return the description alone, with ``data`` None.

        Example:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2)).without_data().data is None
            True
        """
        return replace(self, data=None)

    def init_data(
        self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Allocate ``data`` if it is None.

        Args:
            device: The device of the new tensor.
            init_fn: Called as ``init_fn(local_shape, dtype=dtype, device=device)``.

        Raises:
            CheckpointingException: The tensor of ``init_fn`` has another shape or dtype.

        Example:
            >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2)).without_data()
            >>> shard.init_data("cpu", torch.ones)
            >>> shard.data
            tensor([1., 1.])
        """
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)
            self.validate_metadata_integrity()

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Cut this shard along one local axis, as if every shard were cut in the same way.

        The global shape and offset along the axis shrink by ``length / local size``.

        Args:
            dim: Axis of the local tensor, without prepended axes. Negative counts from the end.
            start: First element, in the local tensor.
            length: Number of elements.

        Returns:
            A list with one item, the narrowed shard. Its ``data`` is a view.

        Raises:
            CheckpointingException: The range is outside the shard, or the global shape or
                offset does not shrink to a whole number.

        Example:
            >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6), (0, 1, 2))
            >>> [half] = shard.narrow(0, 2, 2)
            >>> half.global_shape, half.global_offset
            ((4, 6), (2, 0))
        """
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise CheckpointingException(
                f"key {self.key!r}: cannot narrow axis {dim} of local shape {self.local_shape}"
            )
        dim %= ndim
        if start < 0 or length < 0 or start + length > self.local_shape[dim]:
            raise CheckpointingException(
                f"key {self.key!r}: cannot narrow axis {dim} to [{start}, {start + length}) of "
                f"local shape {self.local_shape}"
            )
        axis = dim + self.prepend_axis_num
        local = self.local_shape[dim]
        return [
            replace(
                self,
                data=None
                if self.data is None
                else to_local_if_dtensor(self.data).narrow(dim, start, length),
                local_shape=_replace_entry(self.local_shape, dim, length),
                global_shape=_scale_entry(self.key, self.global_shape, axis, length, local),
                global_offset=_scale_entry(self.key, self.global_offset, axis, length, local),
            )
        ]

    def validate_metadata_integrity(self) -> None:
        """Check that the fields agree with each other and with ``data``.

        Raises:
            CheckpointingException: They do not agree. The text names the key and both values.

        Example:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2)).validate_metadata_integrity()
        """
        problem = self._find_problem()
        if problem is not None:
            raise CheckpointingException(f"key {self.key!r}: {problem}")

    def _find_problem(self) -> str | None:
        # Locals, which are read faster: every shard of a model is checked when it is made.
        data, local_shape, prepended = self.data, self.local_shape, self.prepend_axis_num
        totals, offsets, counts = self.global_shape, self.global_offset, self.axis_fragmentations
        if self.flattened_range is not None:
            return f"flattened_range is {self.flattened_range!r}, but only None is supported"
        if data is not None:
            if data.dtype != self.dtype:
                return f"dtype is {self.dtype} but data has {data.dtype}"
            # Not to_local_if_dtensor: a shape needs no wait for the tensor.
            found = getattr(data, "_local_tensor", data).shape
            if found != local_shape:
                return f"local_shape is {local_shape} but data has {tuple(found)}"
        ndim = len(local_shape) + prepended
        if prepended < 0 or len(totals) != ndim or len(offsets) != ndim:
            return (
                f"local_shape {local_shape} with {prepended} prepended axes needs "
                f"{ndim} entries in global_shape {totals} and global_offset {offsets}"
            )
        if counts is not None and len(counts) != ndim:
            return f"axis_fragmentations {counts} needs one entry per axis of global_shape {totals}"
        sizes = (1,) * prepended + local_shape
        for axis, offset in enumerate(offsets):
            size, total = sizes[axis], totals[axis]
            if offset < 0 or size < 0 or offset + size > total:
                return (
                    f"axis {axis}: offset {offset} + size {size} is outside the global size {total}"
                )
            if counts is None:
                continue
            if counts[axis] * size != total or (size and offset % size):
                return (
                    f"axis {axis}: {counts[axis]} shards of {size} at offset {offset} are not a "
                    f"regular grid of the global size {total}. Pass axis_fragmentations=None for "
                    "uneven shards"
                )
        return None


def _check_offsets(
    key: str, rank_offsets: Sequence[Sequence[int]], ndim: int
) -> dict[int, tuple[int, int]]:
    """Check ``(axis, index, count)`` triples and return index and count per axis."""
    places: dict[int, tuple[int, int]] = {}
    for triple in rank_offsets:
        if len(triple) != 3:
            raise CheckpointingException(
                f"key {key!r}: offset {tuple(triple)} must be (axis, index, count)"
            )
        axis, place, count = (index(number) for number in triple)
        if not 0 <= axis < ndim:
            raise CheckpointingException(
                f"key {key!r}: axis {axis} of offset {tuple(triple)} is outside the {ndim} axes "
                "(prepended ones included)"
            )
        if axis in places:
            raise CheckpointingException(f"key {key!r}: axis {axis} has two offsets. Pass one")
        if count < 1 or not 0 <= place < count:
            raise CheckpointingException(
                f"key {key!r}: offset {tuple(triple)} needs count >= 1 and 0 <= index < count"
            )
        places[axis] = (place, count)
    return places


def _replace_entry(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def _scale_entry(key: str, shape: Shape, axis: int, length: int, local: int) -> Shape:
    """Multiply one entry by ``length / local``, which must give a whole number."""
    if local == 0:
        return shape
    scaled, rest = divmod(shape[axis] * length, local)
    if rest:
        raise CheckpointingException(
            f"key {key!r}: {shape[axis]} along axis {axis} times {length}/{local} is not a "
            "whole number. Narrow only if all shards are cut in the same way"
        )
    return _replace_entry(shape, axis, scaled)
