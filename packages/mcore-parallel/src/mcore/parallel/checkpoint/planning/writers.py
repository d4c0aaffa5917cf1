"""The plan of a save: each rank describes its leaves, and the first rank chooses their writers."""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import DTYPES, Piece, StoredKey
from mcore.parallel.checkpoint.objects import ShardedObject, serialize
from mcore.parallel.checkpoint.planning.staging import (
    DIGEST_BYTES,
    Candidate,
    CommonValue,
    digest_of,
    digest_shard,
    list_candidates,
)
from mcore.parallel.checkpoint.planning.validation import (
    ShardRecord,
    decode_records,
    describe_entries,
    encode_records,
    raise_if_not_whole,
    validate_plans,
)
from mcore.parallel.checkpoint.sharded import ShardedTensor
from mcore.parallel.checkpoint.state_tree import Entries, Path, Role, dotted, is_bare, named_paths
from mcore.parallel.checkpoint.team import Team
from mcore.parallel.shortened import ranks_text, titled_list
from mcore.tensor.dtensor import is_dtensor

# The flags of a candidate, in one byte. Without a flag another rank writes it.
WRITTEN, COMPARED, PER_RANK = 1, 2, 4


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
    size: int,
    facts: Mapping[str, str],
    *,
    check_replicas: bool = False,
    weights_only: bool = True,
) -> Description:
    """Describe the leaves of one of ``size`` ranks. No communication."""
    records, leaves = describe_entries(entries), list_candidates(entries)
    values = {name: value for name, (_, value) in entries.common.items() if size > 1}
    return Description(
        dict(facts),
        encode_records([one for one in records if one.is_written and one.kind != "common"]),
        encode_records([one for one in records if not one.is_written]),
        encode_records([one for one in records if one.kind == "common"]),
        [one.unique_key for one in leaves if isinstance(one, ShardedObject)],
        [number for number, one in enumerate(leaves) if _may_be_shared(one, size)],
        _pack({name: digest_of(value).hex() for name, value in values.items()}),
        _pack(entries.roles),
        {
            name: (leaf.merge, serialize(name, leaf.value, weights_only=weights_only))
            for name, leaf in entries.merged.items()
        },
        _pack(_digest_replicas(entries) if check_replicas and size > 1 else {}),
        _pack(list(named_paths(entries))),
    )


def _may_be_shared(leaf: Candidate, size: int) -> bool:
    if not isinstance(leaf, ShardedTensor) or not is_bare(leaf) or not prod(leaf.local_shape):
        return False
    return (leaf.data.device_mesh.size() if is_dtensor(leaf.data) else 1) < size


def _digest_replicas(entries: Entries) -> dict[str, str]:
    digests = {
        _name_box(shard.key, shard.global_offset, shard.shard_shape): digest_shard(shard).hex()
        for _, shard in entries.tensors
        if shard.data is not None and prod(shard.local_shape) > 0
    }
    for _, obj in entries.objects:
        if obj.data is not None:
            digests[repr(obj.unique_key)] = digest_of(obj.data).hex()
    for name in entries.common.keys() - entries.merged.keys() - entries.roles.keys():
        digests[repr(name)] = digest_of(entries.common[name][1]).hex()
    return digests


def _name_box(key: str, offset: object, shape: object) -> str:
    return f"{key!r}, offset {offset} shape {shape}"


def _pack(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _unpack(packed: bytes) -> Any:
    return json.loads(zlib.decompress(packed))


class Write(NamedTuple):
    """A leaf that a rank writes."""

    number: int  # of the candidate of the rank
    key: str
    record: ShardRecord


class GlobalPlan:
    """The first rank's plan of a save, from the descriptions of all ranks.

    Attributes:
        flags: A byte for each candidate of each rank.
        merged: Values that combine the values of all ranks. The first rank writes them last.
        differing: The common leaves whose values differ between ranks.

    Raises:
        CheckpointingException: The ranks were given different facts, or hold different tensors or
            content under one key.
    """

    def __init__(self, ranks: Sequence[Description]) -> None:
        _require_equal_facts([rank.facts for rank in ranks])
        replicas = [(number, _unpack(rank.replicas)) for number, rank in enumerate(ranks)]
        raise_if_different((n, name, one[name]) for n, one in replicas for name in one)
        self._ranks = ranks
        packed = {one for rank in ranks for one in (rank.written, rank.common)}
        unpacked = {one: decode_records(one) for one in packed}
        self._shards = [unpacked[rank.written] for rank in ranks]
        self._common = [unpacked[rank.common] for rank in ranks]
        differing = _find_differing([rank.digests for rank in ranks])
        roles: dict[str, set[str]] = {}
        for packed_roles in {rank.roles for rank in ranks}:
            for name, role in _unpack(packed_roles).items():
                roles.setdefault(name, set()).add(role)
        _raise_if_disagreeing(name for name in differing if Role.MUST_AGREE in roles.get(name, ()))
        self._left_out = {name for name, found in roles.items() if found == {Role.LEFT_OUT}}
        self._per_rank = {name for name in differing if Role.PER_RANK in roles.get(name, ())}
        self.merged = _merge_values(ranks)
        self.differing = sorted(differing - roles.keys() - {one.key for one in self.merged})
        self.flags = [bytearray([WRITTEN] * len(records)) for records in self._shards]
        self._share_bare_shards()
        self._assign_common()

    def _share_bare_shards(self) -> None:
        """Let one rank write each shard that several hold."""
        holders: dict[ShardRecord, list[tuple[int, int]]] = {}
        for rank, description in enumerate(self._ranks):
            for number in description.bare:
                holders.setdefault(self._shards[rank][number], []).append((rank, number))
        shared = {record: found for record, found in holders.items() if len(found) > 1}
        # Greedy balance: the largest shard first, each to the holder with the fewest bytes so far.
        load = [0] * len(self._ranks)
        for record in sorted(shared, key=ShardRecord.count_bytes, reverse=True):
            writer = min(shared[record], key=lambda holder: load[holder[0]])
            load[writer[0]] += record.count_bytes()
            for rank, number in shared[record]:
                is_writer = (rank, number) == writer
                self.flags[rank][number] = COMPARED | WRITTEN if is_writer else COMPARED

    def _assign_common(self) -> None:
        """Let the first rank that has a common leaf write it. Tensors must be alike."""
        found: dict[str, tuple[int, ShardRecord]] = {}
        problems: dict[str, str] = {}
        for rank, records in enumerate(self._common):
            for record in records:
                first, other = found.setdefault(record.key, (rank, record))
                if record.key in self._per_rank or record.key in self._left_out:
                    self.flags[rank].append(PER_RANK if record.key in self._per_rank else 0)
                    continue
                self.flags[rank].append(WRITTEN if first == rank else 0)
                if other != record and record.key not in problems:
                    kinds = (
                        f"{other.describe()} on rank {first}, {record.describe()} on rank {rank}"
                    )
                    problems[record.key] = f"{record.key!r}: {kinds}"
        if problems:
            title = (
                "ranks hold different things under one key, of which only one could be saved. Give "
                "each a separate key, or describe shards by ShardedTensor"
            )
            raise CheckpointingException(titled_list(title, list(problems.values())))

    def require_whole(self) -> None:
        """Raise CheckpointingException if the shards of all ranks do not make whole tensors."""
        # Many ranks hold equal replicas, so the first check skips repeats. A failure repeats the
        # check with all of them, to name every rank.
        if validate_plans(self._list_records(each_rank=False)):
            raise_if_not_whole(self._list_records(each_rank=True))

    def _list_records(self, *, each_rank: bool) -> list[list[ShardRecord]]:
        seen: set[bytes] = set()
        ranks = []
        for rank, description in enumerate(self._ranks):
            records = [write.record for write in self.iterate_writes(rank)]
            if each_rank or description.others not in seen:
                seen.add(description.others)
                records += decode_records(description.others)
            ranks.append(records)
        return ranks

    def iterate_writes(self, rank: int) -> Iterator[Write]:
        """Yield the writes of a rank by their numbers, also of shards without elements."""
        records, keys = self._shards[rank], self._ranks[rank].object_keys
        for number, flag in enumerate(self.flags[rank]):
            is_shard = number < len(records)
            record = records[number] if is_shard else self._common[rank][number - len(records)]
            if flag & PER_RANK:
                one = ShardedObject(record.key, None, (len(self._ranks),), (rank,))
                record = ShardRecord(
                    one.kind, one.key, True, "", one.global_shape, one.global_offset
                )
                yield Write(number, one.unique_key, record)
            elif flag & WRITTEN:
                is_object = is_shard and not record.dtype
                key = keys[number - len(records)] if is_object else record.key  # from the end
                yield Write(number, key, record)
        for extra, leaf in enumerate(self.merged if rank == 0 else (), len(self.flags[rank])):
            yield Write(extra, leaf.key, ShardRecord("common", leaf.key, True))

    def count_writes(self) -> tuple[int, int]:
        """Return the largest number of writes of a rank, and of shards that it compares."""
        writes = max(sum(flag & ~COMPARED > 0 for flag in flags) for flags in self.flags)
        compared = max(sum(flag & COMPARED > 0 for flag in flags) for flags in self.flags)
        return writes + len(self.merged), compared

    def compare_shards(self, digests: Sequence[bytes]) -> None:
        """Raise CheckpointingException if ranks hold different bytes of a compared shard.

        ``digests`` has the result of :func:`digest_compared` on each rank.
        """
        compared = []
        for rank, own in enumerate(digests):
            flagged = [number for number, flag in enumerate(self.flags[rank]) if flag & COMPARED]
            for place, number in enumerate(flagged):
                shard = self._shards[rank][number]
                name = _name_box(shard.key, shard.global_offset, shard.shard_shape)
                digest = own[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
                compared.append((rank, name, digest))
        raise_if_different(compared)

    def name_pieces(
        self, rank: int, located: Iterable[tuple[int, Piece]]
    ) -> list[tuple[str, Piece]]:
        """Return the pieces of a rank, given by the numbers of their leaves, with their keys."""
        writes = {write.number: write for write in self.iterate_writes(rank)}
        named = []
        for number, piece in located:
            _, key, record = writes[number]
            box = (record.global_offset, record.shard_shape) if record.dtype else ((), ())
            named.append((key, piece._replace(start=box[0], shape=box[1])))
        return named

    def list_keys(self, pieces: Iterable[tuple[str, Piece]]) -> dict[str, StoredKey]:
        """Return the tensors and objects of the checkpoint, with all their pieces."""
        found: dict[str, list[Piece]] = {}
        for key, piece in pieces:
            found.setdefault(key, []).append(piece)
        keys = {}
        for _, key, record in chain(*map(self.iterate_writes, range(len(self._ranks)))):
            dtype = DTYPES[record.dtype] if record.dtype else None
            shape = record.global_shape if record.dtype else ()
            keys[key] = StoredKey(dtype, shape, found.get(key, ()))
        return keys

    def merge_paths(self) -> dict[str, Path]:
        """Return the path of each key in a nested dict, for torch's converter.

        A key other than its dotted path, such as the key of stacked layers, is put at the top.
        """
        paths: dict[str, Path] = {}
        for one in dict.fromkeys(rank.paths for rank in self._ranks):
            for name, steps in _unpack(one):
                path = tuple(sys.intern(step) if type(step) is str else step for step in steps)
                key = sys.intern(name)
                if paths.setdefault(key, path) != path or dotted(path) != key:
                    paths[key] = (key,)
        for name in self._left_out:
            del paths[name]
        for name in self._per_rank:
            del paths[name]
            for rank in range(len(self._ranks)):
                stored = ShardedObject(name, None, (len(self._ranks),), (rank,))
                paths[stored.unique_key] = (stored.unique_key,)
        return paths


def choose_leaves(
    leaves: Sequence[Candidate], flags: bytes, team: Team
) -> list[tuple[int, Candidate]]:
    """Return the leaves that this rank writes, with their numbers."""
    chosen: list[tuple[int, Candidate]] = []
    for number, (leaf, flag) in enumerate(zip(leaves, flags, strict=True)):
        if flag & PER_RANK and isinstance(leaf, CommonValue):
            chosen.append((number, ShardedObject(leaf.key, leaf.value, (team.size,), (team.rank,))))
        elif flag & WRITTEN and not (
            isinstance(leaf, ShardedTensor) and not prod(leaf.local_shape)
        ):
            chosen.append((number, leaf))
    return chosen


def digest_compared(leaves: Sequence[Candidate], flags: bytes) -> bytes:
    """Return the digests of the shards that this rank compares, one after the other."""
    compared = [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag & COMPARED]
    return b"".join(digest_shard(leaf) for leaf in compared if isinstance(leaf, ShardedTensor))


def _require_equal_facts(ranks: Sequence[Mapping[str, str]]) -> None:
    for name in ranks[0]:
        ranks_of: dict[str, list[int]] = {}
        for number, facts in enumerate(ranks):
            ranks_of.setdefault(facts[name], []).append(number)
        if len(ranks_of) > 1:
            shown = "; ".join(f"{fact} on {ranks_text(some)}" for fact, some in ranks_of.items())
            raise CheckpointingException(
                f"the ranks were given different {name}: {shown}. Pass the same {name} everywhere"
            )


def _merge_values(ranks: Sequence[Description]) -> list[CommonValue]:
    """Make one value of the values of all ranks, for each leaf that has a function for it."""
    values: dict[str, tuple[Any, list[Any]]] = {}
    for rank in ranks:
        for name, (merge, packed) in rank.merged.items():
            value = ShardedObject.decode(BytesIO(packed), weights_only=False)
            values.setdefault(name, (merge, []))[1].append(value)
    return [CommonValue(name, merge(found)) for name, (merge, found) in sorted(values.items())]


def _find_differing(packed: Iterable[bytes]) -> set[str]:
    first: dict[str, str] = {}
    return {
        name
        for one in dict.fromkeys(packed)
        for name, digest in _unpack(one).items()
        if first.setdefault(name, digest) != digest
    }


def _raise_if_disagreeing(names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        title = (
            "states of the optimizer that are no tensors differ between ranks, and only one of "
            "them could be saved. Make them equal, or keep them in tensors that are sharded like "
            "the parameter"
        )
        raise CheckpointingException(titled_list(title, listed, "state"))


def warn_of_differing(names: Sequence[str]) -> None:
    """Warn of common leaves that differ between ranks."""
    if names:
        title = (
            "values outside ShardedTensor and ShardedObject differ between ranks. The value of the "
            "first rank that has the key is saved"
        )
        warnings.warn(titled_list(title, names, "key"), stacklevel=3)


def raise_if_different(digests: Iterable[tuple[int, str, Any]]) -> None:
    """Raise if the digests of one name, each with its rank, differ."""
    found: dict[str, dict[Any, list[int]]] = {}
    for rank, name, digest in digests:
        found.setdefault(name, {}).setdefault(digest, []).append(rank)
    problems = [
        f"{name}: {' and '.join(ranks_text(ranks) for ranks in by_digest.values())}"
        for name, by_digest in sorted(found.items())
        if len(by_digest) > 1
    ]
    if problems:
        title = (
            "ranks hold different bytes under one key, of which only one could be saved. "
            "Synchronise them, or give each a separate key if they are different things"
        )
        raise CheckpointingException(titled_list(title, problems, "key"))
