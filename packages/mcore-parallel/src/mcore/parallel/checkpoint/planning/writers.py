"""The second phase of a save: the first rank chooses the writer of each leaf, and checks all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapreplace
from io import BytesIO
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import ALIGNMENT_BYTES, DTYPES, Piece, StoredKey
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.planning import description, staging, validation
from mcore.parallel.checkpoint.planning.description import Description, ShardRecord
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.checkpoint.state_tree import Path, Role
from mcore.parallel.shortened import ranks_text, titled_list

_DISAGREEING = (
    "states of the optimizer that are no tensors differ between ranks, and only one of them could "
    "be saved. Make them equal, or keep them in tensors that are sharded like the parameter"
)
_DIFFERENT_VALUES = (
    "values outside ShardedTensor and ShardedObject differ between ranks. The value of the first "
    "rank that has the key is saved"
)
_DIFFERENT_CONTENT = (
    "ranks hold different bytes under one key, of which only one could be saved. Synchronise them, "
    "or give each a separate key if they are different things"
)
_OBJECT = ShardRecord("common", "", True)  # without a place in a tensor
# The flags of a candidate, in one byte. Without a flag another rank writes it.
WRITTEN, COMPARED, PER_RANK = 1, 2, 4


class Write(NamedTuple):
    """A leaf that a rank writes."""

    number: int  # of the candidate of the rank
    key: str
    record: ShardRecord


class GlobalPlan:
    """The first rank's plan of a save, from the descriptions of all ranks.

    Warns of common leaves whose values differ between ranks.

    Attributes:
        flags: A byte for each candidate of each rank.
        merged: Values that combine the values of all ranks. The first rank writes them last.

    Raises:
        CheckpointingException: The ranks were given different facts, or hold different tensors or
            content under one key.
    """

    def __init__(self, ranks: Sequence[Description]) -> None:
        packed = [one for rank in ranks for one in (rank.replicas, rank.digests, rank.roles)]
        packed_records = [one for rank in ranks for one in (rank.written, rank.common)]
        plain, records = description.unpack(packed), description.unpack_records(packed_records)
        facts = [(n, name, rank.facts[name]) for n, rank in enumerate(ranks) for name in rank.facts]
        digests = [plain[one] for one in {rank.digests for rank in ranks}]
        contents = [(0, name, one[name]) for one in digests for name in one]
        wrong, different = validation.find_different(facts), validation.find_different(contents)
        for name, values in wrong.items():
            shown = "; ".join(f"{fact} on {ranks_text(some)}" for fact, some in values.items())
            raise CheckpointingException(
                f"the ranks were given different {name}: {shown}. Pass the same {name} everywhere"
            )
        replicas = [(number, plain[rank.replicas]) for number, rank in enumerate(ranks)]
        _require_equal_content([(n, name, one[name]) for n, one in replicas for name in one])
        self._ranks = ranks
        self._shards = [records[rank.written] for rank in ranks]
        self._common = [records[rank.common] for rank in ranks]
        roles: dict[str, set[str]] = {}
        for packed_roles in {rank.roles for rank in ranks}:
            for name, role in plain[packed_roles].items():
                roles.setdefault(name, set()).add(role)
        disagreeing = sorted(name for name in different if Role.MUST_AGREE in roles.get(name, ()))
        if disagreeing:
            raise CheckpointingException(titled_list(_DISAGREEING, disagreeing, "state"))
        self._left_out = {name for name, found in roles.items() if found == {Role.LEFT_OUT}}
        self._per_rank = {name for name in different if Role.PER_RANK in roles.get(name, ())}
        merges: dict[str, tuple[Any, list[Any]]] = {}
        for rank in ranks:
            for name, (merge, content) in rank.merged.items():
                value = ShardedObject.decode(BytesIO(content), weights_only=False)
                merges.setdefault(name, (merge, []))[1].append(value)
        self.merged = [
            staging.CommonValue(name, merge(found))
            for name, (merge, found) in sorted(merges.items())
        ]
        if names := sorted(different.keys() - roles.keys() - {one.key for one in self.merged}):
            warnings.warn(titled_list(_DIFFERENT_VALUES, names, "key"), stacklevel=3)
        self.flags = [bytearray([WRITTEN] * len(records)) for records in self._shards]
        self._load = [0] * len(ranks)  # bytes of leaves that several ranks have, by writer
        self._share_bare_shards()
        self._assign_common(different.keys())

    def _share_bare_shards(self) -> None:
        """Let one rank write each shard that several hold."""
        holders: dict[ShardRecord, list[tuple[int, int]]] = {}
        for rank, described in enumerate(self._ranks):
            for number in described.bare:
                holders.setdefault(self._shards[rank][number], []).append((rank, number))
        shared = {record: found for record, found in holders.items() if len(found) > 1}
        # Greedy balance: the largest shard first, each to the holder with the fewest bytes so far.
        sizes = [(record.count_bytes(), record) for record in shared]
        for num_bytes, record in sorted(sizes, key=itemgetter(0), reverse=True):
            writer = min(shared[record], key=lambda holder: self._load[holder[0]])
            self._load[writer[0]] += num_bytes
            for rank, number in shared[record]:
                is_writer = (rank, number) == writer
                self.flags[rank][number] = COMPARED | WRITTEN if is_writer else COMPARED

    def _assign_common(self, different: Collection[str]) -> None:
        """Choose the writer of each common leaf: the first rank that has it.

        Equal tensors are spread if the first rank would write much more than another.
        """
        ranks_of: dict[bytes, list[int]] = {}  # those with the same leaves
        for rank, described in enumerate(self._ranks):
            ranks_of.setdefault(described.common, []).append(rank)
        not_shared = self._per_rank | self._left_out
        holders: dict[ShardRecord, list[tuple[bytes, int]]] = {}
        for packed, ranks in ranks_of.items():
            flags = bytearray()
            for number, record in enumerate(self._common[ranks[0]]):
                # The first part is written as an object with all of the tensor.
                is_object = record.key in self._per_rank and not any(record.global_offset)
                flags.append(PER_RANK if is_object else 0)
                if record.key not in not_shared:
                    holders.setdefault(record, []).append((packed, number))
            for rank in ranks:
                self.flags[rank] += flags
        kinds = [
            (ranks_of[one][0], record.key, record._replace(global_offset=(), shard_shape=()))
            for record, found in holders.items()
            for one, _ in found
            if len(ranks_of) > 1
        ]
        if problems := [
            f"{key!r}: "
            + ", ".join(f"{kind.describe()} on rank {found[kind][0]}" for kind in found)
            for key, found in (validation.find_different(kinds) if kinds else {}).items()
        ]:
            title = (
                "ranks hold different things under one key, of which only one could be saved. Give "
                "each a separate key, or describe shards by ShardedTensor"
            )
            raise CheckpointingException(titled_list(title, problems))
        queues = {packed: [(0, rank) for rank in ranks] for packed, ranks in ranks_of.items()}
        sizes = [(record.count_bytes(), record) for record in holders]
        for own_bytes, record in sorted(sizes, key=itemgetter(0), reverse=True):
            packed, number = holders[record][0]
            writer = ranks_of[packed][0]
            if record.dtype and record.key not in different:
                # The rank with the fewest bytes so far, over all that have the tensor.
                lowest = [(*self._find_idle(queues[one]), at) for one, at in holders[record]]
                num_bytes, idle, place = min(lowest)
                if self._load[writer] >= num_bytes + staging.PART_BYTES:
                    writer, number = idle, place
            self._load[writer] += own_bytes
            self.flags[writer][len(self._shards[writer]) + number] = WRITTEN

    def _find_idle(self, queue: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the fewest bytes that a rank in a heap writes so far, and the rank."""
        while (num_bytes := self._load[queue[0][1]]) != queue[0][0]:
            heapreplace(queue, (num_bytes, queue[0][1]))
        return queue[0]

    def require_whole(self) -> None:
        """Raise CheckpointingException if the shards of all ranks do not make whole tensors."""
        # Many ranks hold equal replicas, so the first check skips repeats. A failure repeats the
        # check with all of them, to name every rank.
        others = description.unpack_records([one.others for one in self._ranks])
        for skips_repeats in (True, False):
            seen: set[bytes] = set()
            ranks = []
            for rank, described in enumerate(self._ranks):
                records, flags = [*self._shards[rank]], self.flags[rank]
                # Usually a rank writes all of its shards, which have the first flags, and no more.
                more = any(flags[len(records) :]) or (rank == 0 and self.merged)
                if more or flags.count(WRITTEN) < len(records):
                    records = [write.record for write in self.iterate_writes(rank)]
                if not skips_repeats or described.others not in seen:
                    seen.add(described.others)
                    records += others[described.others]
                ranks.append(records)
            problems = validation.validate_plans(ranks)
            if not problems:
                return
        raise CheckpointingException(titled_list(validation.NOT_WHOLE, problems))

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

        ``digests`` has those of each rank's compared shards, one after the other.
        """
        compared = []
        for rank, own in enumerate(digests):
            flagged = [number for number, flag in enumerate(self.flags[rank]) if flag & COMPARED]
            for place, number in enumerate(flagged):
                shard = self._shards[rank][number]
                digest = own[place * staging.DIGEST_BYTES : (place + 1) * staging.DIGEST_BYTES]
                compared.append((rank, description.name_box(shard), digest))
        _require_equal_content(compared)

    def name_pieces(
        self, located: Sequence[tuple[str, Iterable[tuple[int, int, int, bytes]]]]
    ) -> tuple[dict[str, StoredKey], dict[str, list[tuple[str, Piece]]]]:
        """Return the keys of the checkpoint, and the pieces of each file with their keys.

        ``located`` has the file of each rank and its pieces in order: the number of the leaf, the
        length, the bytes before the elements (-1 for an object) and the checksum.
        """
        pieces_of: dict[str, list[Piece]] = {}
        keys: dict[str, StoredKey] = {}
        named = {}
        for rank, (file, pieces) in enumerate(located):
            boxes: dict[int, tuple[str, Shape, Shape]] = {}
            for number, key, record in self.iterate_writes(rank):
                if not record.dtype:
                    record = _OBJECT
                boxes[number] = (key, record.global_offset, record.shard_shape)
                if key not in keys:
                    pieces_of[key] = []
                    dtype = DTYPES.get(record.dtype)
                    keys[key] = StoredKey(dtype, record.global_shape, pieces_of[key])
            end, inside = 0, list[tuple[str, Piece]]()
            for number, length, elements, checksum in pieces:
                key, start, shape = boxes[number]
                at = end + -end % ALIGNMENT_BYTES
                before = None if elements < 0 else elements
                piece = Piece(file, at, length, length, checksum.hex(), before, start, shape)
                pieces_of[key].append(piece)
                inside.append((key, piece))
                end = at + length
            if inside:
                named[file] = inside
        return keys, named

    def merge_paths(self) -> dict[str, Path]:
        """Return the path of each key in a nested dict, for torch's converter.

        A key other than its dotted path, such as the key of stacked layers, is put at the top.
        """
        paths: dict[str, Path] = {}
        unpacked = description.unpack([rank.paths for rank in self._ranks])
        for names, lengths, flat in unpacked.values():
            steps = (sys.intern(step) if type(step) is str else step for step in flat)
            for name, length in zip(names, lengths, strict=True):
                path = tuple(islice(steps, length))
                key = sys.intern(name)
                if paths.setdefault(key, path) != path or ".".join(map(str, path)) != key:
                    paths[key] = (key,)
        for name in self._left_out | self._per_rank:
            del paths[name]
        for name in self._per_rank:
            for rank in range(len(self._ranks)):
                stored = ShardedObject(name, None, (len(self._ranks),), (rank,))
                paths[stored.unique_key] = (stored.unique_key,)
        return paths


def _require_equal_content(digests: Sequence[tuple[int, str, Any]]) -> None:
    """Raise if the digests of one name, each with its rank, differ."""
    different = validation.find_different(digests) if digests else {}
    problems = [
        f"{name}: {' and '.join(map(ranks_text, by_digest.values()))}"
        for name, by_digest in sorted(different.items())
    ]
    if problems:
        raise CheckpointingException(titled_list(_DIFFERENT_CONTENT, problems, "key"))
