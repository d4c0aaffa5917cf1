"""Values of a state dict that are no tensors: sharded objects, and values that stay local."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import ReplicaId, Shape, ShardedBase, as_shape

T = TypeVar("T")

_UNIQUE_KEY = re.compile(r"(?P<key>.*)/shard_(?P<offset>\d+(\.\d+)*)_(?P<shape>\d+(\.\d+)*)", re.S)


@dataclass
class ShardedObject(ShardedBase):
    """A rank's shard of a global array of picklable objects, one object each.

    Attributes:
        key: Name of the array in the checkpoint.
        data: The object of this shard.
        global_shape: Shape of the array.
        global_offset: Index of this shard.
        replica_id: Number of the replica. All zeros is written.

    Raises:
        CheckpointingException: The offset lies outside the shape, or the lengths differ.

    Example:
        >>> ShardedObject("rng", b"state", (2,), (1,)).unique_key
        'rng/shard_1_2'
    """

    key: str
    data: Any = field(repr=False)
    global_shape: Shape
    global_offset: Shape
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = as_shape(self.global_shape)
        self.global_offset = as_shape(self.global_offset)
        pairs = list(zip(self.global_offset, self.global_shape, strict=False))
        fits = all(0 <= offset < size for offset, size in pairs)
        if len(self.global_shape) != len(self.global_offset) or not pairs or not fits:
            raise CheckpointingException(
                f"key {self.key!r}: offset {self.global_offset} is not an index into an array "
                f"of shape {self.global_shape}"
            )

    @property
    def unique_key(self) -> str:
        """``{key}/shard_{offset}_{shape}`` with dots between the numbers."""
        return f"{self.key}/shard_{_join_dots(self.global_offset)}_{_join_dots(self.global_shape)}"

    def without_data(self) -> ShardedObject:
        """Return the description alone, with ``data`` None.

        Example:
            >>> ShardedObject("rng", b"state", (1,), (0,)).without_data().data is None
            True
        """
        return replace(self, data=None)

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Rebuild a description from its ``unique_key``. The key may contain slashes.

        Args:
            unique_key: ``{key}/shard_{offset}_{shape}``.
            replica_id: Number of the replica.

        Returns:
            The description, with ``data`` None.

        Raises:
            CheckpointingException: The text has another form.

        Example:
            >>> ShardedObject.empty_from_unique_key("a/b/shard_1.0_2.3").global_shape
            (2, 3)
        """
        match = _UNIQUE_KEY.fullmatch(unique_key)
        if match is None:
            raise CheckpointingException(
                f"{unique_key!r} is not the unique key of an object, which has the form "
                "'KEY/shard_OFFSET_SHAPE', such as 'rng/shard_0_1'"
            )
        return cls(
            key=match["key"],
            data=None,
            global_shape=_split_dots(match["shape"]),
            global_offset=_split_dots(match["offset"]),
            replica_id=replica_id,
        )


def _join_dots(numbers: Shape) -> str:
    return ".".join(map(str, numbers))


def _split_dots(text: str) -> Shape:
    return tuple(map(int, text.split(".")))


class LocalNonpersistentObject(Generic[T]):
    """A value that is never saved. A load returns the local value.

    Args:
        obj: The value.

    Example:
        >>> LocalNonpersistentObject([1, 2]).unwrap()
        [1, 2]
    """

    def __init__(self, obj: T) -> None:
        self.obj = obj

    def unwrap(self) -> T:
        """Return the value.

        Example:
            >>> LocalNonpersistentObject("local").unwrap()
            'local'
        """
        return self.obj
