"""The first phase of a save: each rank describes its leaves in few bytes, without their content.

Equal descriptions have equal bytes, so the first rank unpacks those of many ranks once.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from mcore.parallel.checkpoint.files.index import pause_collection
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.planning import staging
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import MESH_SIZE, Entries


class ShardRecord(NamedTuple):
    """One entry of a rank's state dict.

    Attributes:
        kind: ``"tensor"``, ``"common"``, or the kind of the object, such as ``"object"``.
        key: Name. For ``"common"`` the dotted path.
        is_written: Whether this rank writes it.
        dtype: Name of the dtype, empty for objects and values.
        global_shape: Shape of the tensor (prepended axes first) or array of objects.
        global_offset: Start of the shard. Empty for replicas that are not written.
        shard_shape: Shape of the shard, prepended axes first. Empty for objects and for replicas
            that are not written.
        prepend_axis_num: Number of prepended axes.
    """

    kind: str
    key: str
    is_written: bool
    dtype: str = ""
    global_shape: Shape = ()
    global_offset: Shape = ()
    shard_shape: Shape = ()
    prepend_axis_num: int = 0

    def describe(self) -> str:
        """Return dtype and shape as text."""
        return f"dtype {self.dtype} shape {self.global_shape}" if self.dtype else "no tensor"

    def count_bytes(self) -> int:
        """Return the size of the shard, 0 if it is no tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize if self.dtype else 0
        return prod(self.shard_shape) * itemsize


_FIELDS, _TEXTS, _SHAPES = 8, (0, 1, 3), (4, 5, 6)  # of a record: number, and places by type


class Description(NamedTuple):
    """The leaves of a rank without their content, in the order of :func:`list_candidates`.

    Parts that are often equal on many ranks are packed separately: equal bytes are unpacked once.
    """

    facts: dict[str, str]  # must be equal on all ranks
    written: bytes  # records of main replicas of shards, then of objects
    others: bytes  # records of their other replicas
    common: bytes  # records of common leaves
    object_keys: list[str]  # of the objects in ``written``
    bare: list[int]  # numbers of shards that ranks outside of their mesh may hold too
    digests: bytes  # of common leaves, by name
    roles: bytes  # of common leaves, by name
    merged: dict[str, tuple[Any, bytes]]  # function and value by name, see OneLeaf
    replicas: bytes  # digests of all leaves, if replicas are compared
    paths: bytes


def describe_leaves(
    entries: Entries,
    leaves: Sequence[staging.Candidate],
    size: int,
    facts: Mapping[str, str],
    *,
    check_replicas: bool = False,
    weights_only: bool = True,
) -> Description:
    """Describe the leaves of one of ``size`` ranks, also as candidates. No communication."""
    records = describe_entries(entries, is_first=False)
    written = [one for one in records if one.is_written]
    others = [one for one in records if not one.is_written]
    common = [_describe_common(one) for one in leaves if isinstance(one, staging.CommonValue)]
    bare = [
        number
        for number, one in enumerate(leaves)
        if isinstance(one, ShardedTensor)
        and getattr(one, MESH_SIZE, size) < size
        and prod(one.local_shape)
    ]
    values = {name: value for name, (_, value) in entries.common.items() if size > 1}
    named = [(shard.key, path) for path, shard in entries.tensors]
    named += [(one.unique_key, path) for path, one in entries.objects]
    named += [(name, path) for name, (path, _) in entries.common.items()]
    # Of text and numbers, text first, as torch's converter needs them.
    plain = {str, int}
    paths = [one for one in named if type(one[1][0]) is str and set(map(type, one[1])) <= plain]
    steps = [step for _, path in paths for step in path]
    return Description(
        dict(facts),
        encode_records(written),
        encode_records(others),
        encode_records(common),
        [one.unique_key for one in leaves if isinstance(one, ShardedObject)],
        bare,
        pack({name: staging.digest_of(value).hex() for name, value in values.items()}),
        pack(entries.roles),
        {
            name: (leaf.merge, serialize(name, leaf.value, weights_only=weights_only))
            for name, leaf in entries.merged.items()
        },
        pack(_digest_replicas(entries) if check_replicas and size > 1 else {}),
        pack([[one for one, _ in paths], [len(one) for _, one in paths], steps]),
    )


def _digest_replicas(entries: Entries) -> dict[str, str]:
    shards = [shard for _, shard in entries.tensors]
    digests = {
        name_box(shard): staging.digest_of(staging.view_box(shard, local)).hex()
        for shard, local in zip(shards, staging.list_local(shards), strict=True)
        if local is not None and prod(shard.local_shape) > 0
    }
    for _, obj in entries.objects:
        if obj.data is not None:
            digests[repr(obj.unique_key)] = staging.digest_of(obj.data).hex()
    for name in entries.common.keys() - entries.merged.keys() - entries.roles.keys():
        digests[repr(name)] = staging.digest_of(entries.common[name][1]).hex()
    return digests


def name_box(shard: ShardedTensor | ShardRecord) -> str:
    """Return key and place of a shard as text."""
    return f"{shard.key!r}, offset {shard.global_offset} shape {shard.shard_shape}"


def describe_entries(entries: Entries, *, is_first: bool = True) -> list[ShardRecord]:
    """List the entries that a rank writes and, once per key, its unwritten replicas.

    Only a first rank writes common leaves.
    """
    unwritten: dict[ShardRecord, None] = {}
    written: list[ShardRecord] = []
    shards: list[ShardedTensor | ShardedObject] = [one for _, one in entries.tensors]
    for one in shards + [one for _, one in entries.objects]:
        if isinstance(one, ShardedTensor):
            kind, dtype = "tensor", str(one.dtype).removeprefix("torch.")
            shape, prepended = one.shard_shape, one.prepend_axis_num
        else:
            kind, dtype, shape, prepended = one.kind, "", (), 0
        place = (dtype, one.global_shape, one.global_offset, shape, prepended)
        record = ShardRecord(kind, one.key, True, *place)
        if is_main_replica(one.replica_id):
            written.append(record)
        else:
            unwritten[record._replace(is_written=False, global_offset=(), shard_shape=())] = None
    for leaf in staging.list_candidates(entries) if is_first else ():
        if isinstance(leaf, staging.CommonValue):
            written.append(_describe_common(leaf))
    return written + list(unwritten)


def _describe_common(leaf: staging.CommonValue) -> ShardRecord:
    """Return the record of a common leaf, or of a part of it."""
    if leaf.shape is None:
        return ShardRecord("common", leaf.key, True)
    dtype, shape = str(leaf.value.dtype).removeprefix("torch."), tuple(leaf.value.shape)
    return ShardRecord("common", leaf.key, True, dtype, shape, leaf.start, leaf.shape)


def encode_records(records: Sequence[ShardRecord]) -> bytes:
    """Pack records. Equal records have equal bytes."""
    # Columns and each shape once: as lists, many shapes are slow to read and to collect as garbage.
    shapes: dict[Shape, int] = {}
    columns: list[list[Any]] = [[one[place] for one in records] for place in range(_FIELDS)]
    for place in _SHAPES:
        columns[place] = [shapes.setdefault(one, len(shapes)) for one in columns[place]]
    return pack([list(shapes), *columns])


def pack(value: Any) -> bytes:
    """Return a value of JSON as few bytes."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(packed: Iterable[bytes]) -> dict[bytes, Any]:
    """Return the values of :func:`pack`, each once."""
    return {one: json.loads(zlib.decompress(one)) for one in dict.fromkeys(packed)}


def unpack_records(packed: Iterable[bytes]) -> dict[bytes, list[ShardRecord]]:
    """Return the records of :func:`encode_records`, each list once."""
    with pause_collection():
        return {one: decode_records(one) for one in dict.fromkeys(packed)}


def decode_records(packed: bytes) -> list[ShardRecord]:
    """Return the records of :func:`encode_records`."""
    shapes, *columns = json.loads(zlib.decompress(packed))
    shapes = list(map(tuple, shapes))  # equal shapes and texts share memory
    for place in _SHAPES:
        columns[place] = map(shapes.__getitem__, columns[place])
    for place in _TEXTS:
        columns[place] = map(sys.intern, columns[place])
    return list(map(ShardRecord, *columns))
