"""Do the parts that all ranks want to write make whole tensors, each element once?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from mcore.parallel.checkpoint.boxes import overlapping_pairs
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.shard_records import (
    ShardRecord,
    decode_records,
    describe_entries,
    encode_records,
)
from mcore.parallel.checkpoint.state_tree import flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import ranks_text, titled_list

if TYPE_CHECKING:
    from mcore.parallel.groups import GroupLike

__all__ = ["validate_plans", "validate_sharding_integrity"]

RankedRecord = tuple[int, ShardRecord]
TITLE = "the shards of all ranks do not make up whole tensors"


def validate_plans(list_of_rank_metadata: Sequence[Sequence[ShardRecord]]) -> list[str]:
    """Check the records of all ranks against each other, in one process.

    A pure function: thousands of ranks can be checked without starting one.

    Args:
        list_of_rank_metadata: The records of each rank, in rank order.

    Returns:
        One sentence per problem with the key and the ranks, none if all is well.

    Example:
        >>> whole = ShardRecord("tensor", "w", True, "float32", (4,), (0,), (4,))
        >>> validate_plans([[whole], [whole]])
        ["tensor 'w': ranks 0-1 write the same part, offset (0,) shape (4,); give all but one a \
replica_id other than 0"]
    """
    by_entry: dict[tuple[str, str], list[RankedRecord]] = {}
    for rank, records in enumerate(list_of_rank_metadata):
        for record in records:
            by_entry.setdefault((record.kind, record.key), []).append((rank, record))
    problems = _name_clashes(by_entry)
    for kind, key in sorted(by_entry):
        check = _tensor_problems if kind == "tensor" else _object_problems
        if kind != "common":
            problems += [f"{kind} {key!r}: {text}" for text in check(by_entry[kind, key])]
    return problems


def _name_clashes(by_entry: dict[tuple[str, str], list[RankedRecord]]) -> list[str]:
    kinds: dict[str, set[str]] = {}
    for kind, key in by_entry:
        kinds.setdefault(key, set()).add(kind)
    return [
        f"{key!r} names a {' and a '.join(sorted(found))} entry at the same time; rename one"
        for key, found in sorted(kinds.items())
        if len(found) > 1
    ]


def _tensor_problems(records: list[RankedRecord]) -> list[str]:
    different = _differing_fields(records, ("dtype", "global_shape", "prepend_axis_num"))
    if different:
        return different
    return _outside(records) or _writer_problems(records)


def _object_problems(records: list[RankedRecord]) -> list[str]:
    different = _differing_fields(records, ("global_shape",))
    if different:
        return different
    problems = _repeated(records, lambda record: f"cell {record.global_offset}")
    cells = {record.global_offset for _, record in records if record.is_main}
    total = prod(records[0][1].global_shape)
    if len(cells) != total:
        problems.append(f"{len(cells)} of {total} cells are written; {_missing_writer(records)}")
    return problems


def _differing_fields(records: list[RankedRecord], names: Sequence[str]) -> list[str]:
    problems = []
    for name in names:
        ranks_of: dict[Any, list[int]] = {}
        for rank, record in records:
            ranks_of.setdefault(getattr(record, name), []).append(rank)
        if len(ranks_of) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            problems.append(f"{name} differs: {shown}")
    return problems


def _outside(records: list[RankedRecord]) -> list[str]:
    return [
        f"the part of rank {rank}, offset {part.global_offset} shape {part.box_shape}, lies "
        f"outside the global shape {part.global_shape}"
        for rank, part in records
        if part.is_main and not _is_inside(part)
    ]


def _is_inside(part: ShardRecord) -> bool:
    return len(part.global_offset) == len(part.box_shape) == len(part.global_shape) and all(
        start >= 0 and size >= 0 and start + size <= total
        for start, size, total in zip(
            part.global_offset, part.box_shape, part.global_shape, strict=True
        )
    )


def _writer_problems(records: list[RankedRecord]) -> list[str]:
    filled = [(rank, part) for rank, part in records if part.is_main and prod(part.box_shape) > 0]
    problems = _repeated(
        filled, lambda part: f"part, offset {part.global_offset} shape {part.box_shape}"
    )
    owners = {(part.global_offset, part.box_shape): rank for rank, part in filled}
    boxes = sorted(owners)
    for first, second in overlapping_pairs(boxes):
        problems.append(
            f"the parts of rank {owners[boxes[first]]} (offset, shape) {boxes[first]} and rank "
            f"{owners[boxes[second]]} {boxes[second]} overlap"
        )
    covered = sum(prod(shape) for _, shape in boxes)
    total = prod(records[0][1].global_shape)
    if covered != total:
        problems.append(
            f"the parts that are written have {covered} elements and the global shape "
            f"{records[0][1].global_shape} has {total}; {_missing_writer(records)}"
        )
    return problems


def _repeated(records: list[RankedRecord], describe: Any) -> list[str]:
    """Report what more than one record wants to write."""
    writers: dict[tuple[Any, Any], list[int]] = {}
    sample: dict[tuple[Any, Any], ShardRecord] = {}
    for rank, record in records:
        if record.is_main:
            place = (record.global_offset, record.box_shape)
            writers.setdefault(place, []).append(rank)
            sample[place] = record
    return [
        f"{_ranks(writers[place])} write the same {describe(sample[place])}; give all but one a "
        "replica_id other than 0"
        for place in sorted(writers)
        if len(writers[place]) > 1
    ]


def _missing_writer(records: list[RankedRecord]) -> str:
    holders = sorted({rank for rank, record in records if not record.is_main})
    if not holders:
        return "some part is on no rank"
    return (
        f"copies that are not written are on {_ranks(holders)}: one copy of each part needs "
        "replica_id 0"
    )


def _ranks(ranks: Sequence[int]) -> str:
    counted = Counter(ranks)
    twice = [rank for rank in counted if counted[rank] > 1]
    note = f" ({ranks_text(sorted(twice))} more than once)" if twice else ""
    return ranks_text(sorted(counted)) + note


def validate_sharding_integrity(
    sharded_state_dict: dict[str, Any], process_group: GroupLike | None = None
) -> None:
    """Check that all ranks together write every element of every tensor and object once.

    Collective over ``process_group``: one gather to its first rank, whose verdict all ranks get.
    Without torch.distributed the state dict must be whole by itself.

    Args:
        sharded_state_dict: This rank's part; nested dicts and lists are fine.
        process_group: The ranks that hold the parts; None is the world.

    Raises:
        CheckpointingException: On every rank, with at most 20 problems, keys and ranks: dtype,
            global shape or prepended axes differ, two ranks write one part, parts overlap, lie
            outside or leave a hole.
        ValueError: This rank is not a member of the group.

    Example:
        >>> import torch
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> whole = make_sharded_tensor_for_checkpoint(torch.zeros(4), "norm")
        >>> validate_sharding_integrity({"norm": whole})
    """
    team = team_of(process_group)
    packed = team.agree(lambda: _packed(sharded_state_dict, team))
    gathered = team.gather_bytes(packed)
    team.agree(lambda: raise_if_not_whole([decode_records(part) for part in gathered]))


def _packed(sharded_state_dict: dict[str, Any], team: Team) -> bytes:
    entries = flatten_state_dict(sharded_state_dict)
    return encode_records(describe_entries(entries, with_common=team.is_first))


def raise_if_not_whole(ranks: Sequence[Sequence[ShardRecord]]) -> None:
    """Raise one CheckpointingException with what :func:`validate_plans` finds."""
    problems = validate_plans(ranks)
    if problems:
        raise CheckpointingException(titled_list(TITLE, problems))
