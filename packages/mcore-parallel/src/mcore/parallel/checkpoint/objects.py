"""Values of a state dict that are no tensors: sharded objects, and values that stay local.

A new kind of object is a subclass of :class:`ShardedObject`, see there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from mcore.parallel.checkpoint import sharded
from mcore.parallel.checkpoint.errors import CheckpointingException

T = TypeVar("T")

_UNIQUE_KEY = re.compile(
    r"(?P<key>.*)/(?P<mark>[a-z]+)_(?P<offset>\d+(\.\d+)*)_(?P<shape>\d+(\.\d+)*)", re.S
)


@dataclass
class ShardedObject(sharded.ShardedBase):
    """A rank's shard of a global array of picklable objects, one object each.

    A subclass can store its objects in another form: it has another ``kind`` and ``mark``,
    overrides :meth:`encode` and :meth:`decode`, and sets ``is_archive`` to False. Everything
    else, from validation to the command line, works for it too.

    Attributes:
        key: Name of the array in the checkpoint.
        data: The object of this shard.
        global_shape: Shape of the array.
        global_offset: Index of this shard.
        replica_id: Number of the replica. All zeros is written.
        kind: Name of the kind of object in errors and on the command line.
        mark: Small letters in :attr:`unique_key`, by which a reader finds the kind of an object.
        is_archive: Whether the stored bytes are an archive of ``torch.save``.

    Raises:
        CheckpointingException: The offset lies outside the shape, or the lengths differ.

    Example:
        >>> ShardedObject("rng", b"state", (2,), (1,)).unique_key
        'rng/shard_1_2'
    """

    key: str
    data: Any = field(repr=False)
    global_shape: sharded.Shape
    global_offset: sharded.Shape
    replica_id: sharded.ReplicaId = 0
    kind: ClassVar[str] = "object"
    mark: ClassVar[str] = "shard"
    is_archive: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        # A subclass without a mark is stored, and read without the subclass, as its base.
        _KINDS.setdefault(cls.mark, cls)

    def __post_init__(self) -> None:
        self.global_shape = sharded.as_shape(self.global_shape)
        self.global_offset = sharded.as_shape(self.global_offset)
        pairs = list(zip(self.global_offset, self.global_shape, strict=False))
        fits = all(0 <= offset < size for offset, size in pairs)
        if len(self.global_shape) != len(self.global_offset) or not pairs or not fits:
            raise CheckpointingException(
                f"key {self.key!r}: offset {self.global_offset} is not an index into an array "
                f"of shape {self.global_shape}"
            )

    @property
    def unique_key(self) -> str:
        """``{key}/{mark}_{offset}_{shape}`` with dots between the numbers."""
        offset, shape = (".".join(map(str, one)) for one in (self.global_offset, self.global_shape))
        return f"{self.key}/{self.mark}_{offset}_{shape}"

    def encode(self, *, weights_only: bool = True) -> bytes:
        """Return the bytes that are stored: by default an archive of ``torch.save``.

        Args:
            weights_only: Refuse an object that can be loaded only by running code.

        Raises:
            CheckpointingException: The object cannot be stored, or would not be loaded.

        Example:
            >>> stored = ShardedObject("rng", [1], (1,), (0,)).encode()
            >>> ShardedObject.decode(io.BytesIO(stored))
            [1]
        """
        return serialize(self.unique_key, self.data, weights_only=weights_only)

    @classmethod
    def decode(cls, content: io.BytesIO, *, weights_only: bool = True) -> Any:
        """Return the object in the bytes of :meth:`encode`. Damage raises any error.

        Args:
            content: The stored bytes.
            weights_only: Refuse to run code.
        """
        return torch.load(content, map_location="cpu", weights_only=weights_only)

    def without_data(self) -> ShardedObject:
        """Return the description alone, with ``data`` None.

        Example:
            >>> ShardedObject("rng", b"state", (1,), (0,)).without_data().data is None
            True
        """
        return replace(self, data=None)

    @classmethod
    def empty_from_unique_key(
        cls, unique_key: str, replica_id: sharded.ReplicaId = 0
    ) -> ShardedObject:
        """Rebuild a description from its ``unique_key``. The key may contain slashes.

        Args:
            unique_key: ``{key}/{mark}_{offset}_{shape}``.
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
        if match is None or match["mark"] != cls.mark:
            raise CheckpointingException(
                f"{unique_key!r} is not the unique key of an object, which has the form "
                f"'KEY/{cls.mark}_OFFSET_SHAPE', such as 'rng/{cls.mark}_0_1'"
            )
        offset, shape = (tuple(map(int, match[name].split("."))) for name in ("offset", "shape"))
        return cls(match["key"], None, shape, offset, replica_id)


_KINDS = {ShardedObject.mark: ShardedObject}


def object_kind(name: str) -> type[ShardedObject]:
    """Return the kind of an object in a checkpoint, ShardedObject if its name has no other mark."""
    match = _UNIQUE_KEY.fullmatch(name)
    return ShardedObject if match is None else _KINDS.get(match["mark"], ShardedObject)


def serialize(name: str, value: Any, *, weights_only: bool = True) -> bytes:
    """Pickle a value in the format of torch.save.

    With ``weights_only``, raise for a value that can be loaded only by running code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise CheckpointingException(
            f"{name!r} of type {type(value).__name__} cannot be pickled "
            f"({type(error).__name__}: {error}). Save plain values, or wrap it in "
            "LocalNonpersistentObject"
        ) from error
    if weights_only and not _is_plain(value):
        stream.seek(0)
        try:
            # The meta device skips the bytes of tensors.
            torch.load(stream, map_location="meta", weights_only=True)
        except Exception as error:
            kind = next(_find_odd_types(value), type(value))
            raise CheckpointingException(
                f"{name!r} holds a {kind.__module__}.{kind.__qualname__}, which a load would "
                "refuse, since unpickling it runs code. Save plain values and tensors (an array as "
                "torch.from_numpy(array), a NumPy scalar as value.item(), a path as str(path), "
                "...), or pass weights_only=False to both the save and the load"
            ) from error
    return stream.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _find_odd_types(value: Any) -> Iterator[type]:
    """Yield the types inside a value that are neither plain nor containers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_odd_types(key)
            yield from _find_odd_types(item)
    elif type(value) in (list, tuple, set):
        for item in value:
            yield from _find_odd_types(item)
    elif not _is_plain(value) and type(value) is not torch.Tensor:
        yield type(value)


class LocalNonpersistentObject(sharded.LocalEntry, Generic[T]):
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
