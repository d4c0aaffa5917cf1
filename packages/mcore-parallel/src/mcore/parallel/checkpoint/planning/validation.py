"""The check that the shards of all ranks make whole tensors."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import Box, is_inside
from mcore.parallel.checkpoint.planning import description
from mcore.parallel.checkpoint.planning.description import ShardRecord
from mcore.parallel.checkpoint.state_tree import flatten_state_dict
from mcore.parallel.checkpoint.team import team_of
from mcore.parallel.shortened import ranks_text, titled_list

if TYPE_CHECKING:
    from mcore.parallel.groups import GroupLike

NOT_WHOLE = "the shards of all ranks do not make up whole tensors"


_EQUAL = ("dtype", "global_shape", "prepend_axis_num")  # in all records of a tensor
RankedRecord = tuple[int, ShardRecord]


def describe_shards(
    state_dict: Mapping[str, Any], *, is_first_rank: bool = False
) -> list[ShardRecord]:
    """List the entries that a rank with this state dict writes or holds replicas of.

    No communication. The lists of all ranks are the input of :func:`validate_plans`.

    Args:
        state_dict: The rank's sharded state dict. Meta tensors are accepted.
        is_first_rank: Whether the rank writes the leaves that are equal on all ranks.

    Returns:
        The records in a fixed order. The unwritten replicas of a key share one record.

    Raises:
        CheckpointingException: It is not a state dict.

    Example:
        >>> import torch
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> shard = make_sharded_tensor_for_checkpoint(torch.zeros(3), "w")
        >>> [record.shard_shape for record in describe_shards({"w": shard})]
        [(3,)]
    """
    return description.describe_entries(flatten_state_dict(state_dict), is_first=is_first_rank)


def validate_plans(list_of_rank_metadata: Sequence[Sequence[ShardRecord]]) -> list[str]:
    """Check the records of all ranks against each other, in one process.

    A pure function: it can check thousands of ranks without starting them.

    Args:
        list_of_rank_metadata: The records of each rank, in rank order.

    Returns:
        One text per problem, with the key and the ranks.

    Example:
        >>> whole = ShardRecord("tensor", "w", True, "float32", (4,), (0,), (4,))
        >>> validate_plans([[whole], [whole]])
        ["tensor 'w': ranks 0-1 write the same shard, offset (0,) shape (4,). Give all but one a \
replica_id other than 0"]
    """
    # Each of perhaps millions of records is read once, to add its box to those with equal facts.
    # Ranks are needed only if a key may have a problem.
    boxes: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    read_facts = attrgetter(*_EQUAL)
    for records in list_of_rank_metadata:
        for one in records:
            box, facts = one.global_offset + one.shard_shape, read_facts(one)
            boxes[one.kind, one.key, facts, one.is_written, len(one.global_offset), len(box)] += box
    found: dict[str, dict[str, list[tuple[Any, ...]]]] = defaultdict(lambda: defaultdict(list))
    for (kind, key, *facts_of_boxes), numbers in boxes.items():
        found[kind][key].append((*facts_of_boxes, numbers))
    kinds = sorted(found)
    counts = Counter(key for kind in kinds for key in found[kind])
    problems = [
        f"{key!r} names a {' and a '.join(kind for kind in kinds if key in found[kind])} "
        "entry at the same time. Rename one"
        for key in sorted(counts)
        if counts[key] > 1
    ]
    suspects: dict[tuple[str, str], list[RankedRecord]] = {
        (kind, key): []
        for kind in kinds
        for key in sorted(found[kind])
        if not (kind == "common" or (kind == "tensor" and _is_whole_grid(found[kind][key])))
    }
    for rank, records in enumerate(list_of_rank_metadata if suspects else ()):
        for record in records:
            if (record.kind, record.key) in suspects:
                suspects[record.kind, record.key].append((rank, record))
    for (kind, key), ranked in suspects.items():
        check = _find_tensor_problems if kind == "tensor" else _find_object_problems
        problems += [f"{kind} {key!r}: {text}" for text in check(ranked)]
    return problems


def validate_sharding_integrity(
    sharded_state_dict: dict[str, Any], process_group: GroupLike | None = None
) -> None:
    """Check that all ranks together write every element of every tensor and object once.

    Collective over ``process_group``: one gather to its first rank, which sends the result to all.
    Without torch.distributed the state dict must be whole without other ranks.

    Args:
        sharded_state_dict: This rank's state dict. Nested dicts and lists are accepted.
        process_group: The ranks that hold the shards. None is the world.

    Raises:
        CheckpointingException: On every rank, with at most 20 problems, keys and ranks: dtype,
            global shape or prepended axes differ, two ranks write one shard, shards overlap, are
            outside the tensor or leave a hole.
        ValueError: This rank is not a member of the group.

    Example:
        >>> import torch
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> whole = make_sharded_tensor_for_checkpoint(torch.zeros(4), "norm")
        >>> validate_sharding_integrity({"norm": whole})
    """
    team = team_of(process_group)

    def pack() -> tuple[bytes, list[int]]:
        entries = flatten_state_dict(sharded_state_dict)
        records = description.describe_entries(entries, is_first=team.is_first)
        packed = description.encode_records(records)
        return packed, [len(packed)]

    packed, [width] = team.agree_max(pack, 1)
    gathered = team.gather(packed, width)

    def check() -> None:
        if problems := validate_plans([description.decode_records(one) for one in gathered]):
            raise CheckpointingException(titled_list(NOT_WHOLE, problems))

    team.agree(check)


def _is_whole_grid(found: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether shards of one shape, each written once, make up a tensor. A quick check.

    ``found`` has facts of boxes, whether they are written, numbers of axes, and all their numbers.
    """
    shape = found[0][0][_EQUAL.index("global_shape")]
    axes, written = len(shape), [one for one in found if one[1]]
    if len({facts for facts, *_ in found}) > 1 or len(written) != 1 or not axes:
        return False
    *_, axes_of_offset, axes_of_box, numbers = written[0]
    if (axes_of_offset, axes_of_box) != (axes, 2 * axes):
        return False
    try:
        table = torch.frombuffer(array("q", [*shape, *numbers]), dtype=torch.int64)
    except (OverflowError, TypeError):
        return False
    whole, (starts, sizes) = table[:axes], table[axes:].view(-1, 2, axes).unbind(1)
    size = sizes[0]
    if not (sizes == size).all() or (size < 1).any() or (whole % size).any():
        return False
    grid, is_inside_grid = (whole // size).tolist(), (starts >= 0) & (starts < whole)
    if prod(grid) != len(starts) or (starts % size).any() or not is_inside_grid.all():
        return False
    is_written = torch.zeros(grid, dtype=torch.bool, device="cpu")
    is_written[(starts // size).unbind(1)] = True
    return bool(is_written.all())


def _find_tensor_problems(records: list[RankedRecord]) -> list[str]:
    different = _find_differences(records, _EQUAL)
    if different:
        return different
    problems = [
        f"the shard of rank {rank}, offset {shard.global_offset} shape {shard.shard_shape}, is "
        f"outside the global shape {shard.global_shape}"
        for rank, shard in records
        if shard.is_written
        and not is_inside(shard.global_offset, shard.shard_shape, shard.global_shape)
    ]
    return problems or _find_writer_problems(records)


def _find_object_problems(records: list[RankedRecord]) -> list[str]:
    different = _find_differences(records, ("global_shape",))
    if different:
        return different
    problems = _find_repeated(records)
    places = {record.global_offset for _, record in records if record.is_written}
    total = prod(records[0][1].global_shape)
    if len(places) != total:
        problems.append(
            f"{len(places)} of {total} objects are written ({_describe_missing_writer(records)})"
        )
    return problems


def _find_differences(records: list[RankedRecord], names: Sequence[str]) -> list[str]:
    values = [
        (rank, name, getattr(record, name))
        for name in names
        if len({getattr(record, name) for _, record in records}) > 1
        for rank, record in records
    ]
    return [
        f"{name} differs: "
        + "; ".join(f"{value} on {_format_ranks(ranks)}" for value, ranks in found.items())
        for name, found in find_different(values).items()
    ]


def find_different(items: Sequence[tuple[int, str, Any]]) -> dict[str, dict[Any, list[int]]]:
    """Return the names with several values, from ranks, names and values. Values have ranks."""
    first: dict[str, Any] = {}
    names = {name for _, name, value in items if first.setdefault(name, value) != value}
    found: dict[str, dict[Any, list[int]]] = {name: {} for name in first if name in names}
    for rank, name, value in items if names else ():
        if name in names:
            found[name].setdefault(value, []).append(rank)
    return found


def _find_writer_problems(records: list[RankedRecord]) -> list[str]:
    filled = [(rank, one) for rank, one in records if one.is_written and prod(one.shard_shape) > 0]
    problems = _find_repeated(filled)
    owners = {(shard.global_offset, shard.shard_shape): rank for rank, shard in filled}
    places = sorted(owners)
    for first, second in overlapping_pairs(places):
        problems.append(
            f"the shards of rank {owners[places[first]]} (offset, shape) {places[first]} and rank "
            f"{owners[places[second]]} {places[second]} overlap"
        )
    covered = sum(prod(shape) for _, shape in places)
    total = prod(records[0][1].global_shape)
    if covered != total:
        problems.append(
            f"the shards that are written have {covered} elements and the global shape "
            f"{records[0][1].global_shape} has {total} ({_describe_missing_writer(records)})"
        )
    return problems


def _find_repeated(records: list[RankedRecord]) -> list[str]:
    """Report boxes that more than one record writes."""
    writers: dict[Box, list[int]] = {}
    for rank, record in records:
        if record.is_written:
            place = (record.global_offset, record.shard_shape)
            writers.setdefault(place, []).append(rank)
    is_tensor = any(record.dtype for _, record in records)
    return [
        f"{_format_ranks(ranks)} write the same "
        + (f"shard, offset {offset} shape {shape}" if is_tensor else f"object {offset}")
        + ". Give all but one a replica_id other than 0"
        for (offset, shape), ranks in sorted(writers.items())
        if len(ranks) > 1
    ]


def _describe_missing_writer(records: list[RankedRecord]) -> str:
    holders = sorted({rank for rank, record in records if not record.is_written})
    if not holders:
        return "some shard is on no rank"
    return (
        f"replicas that are not written are on {_format_ranks(holders)}: one replica of each shard "
        "needs replica_id 0"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    counted = Counter(ranks)
    twice = [rank for rank in counted if counted[rank] > 1]
    note = f" ({ranks_text(sorted(twice))} more than once)" if twice else ""
    return ranks_text(sorted(counted)) + note


def have_shared_elements(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes of a tensor share an element."""
    filled = [box for box in boxes if prod(box[1]) > 0]
    return len(set(filled)) < len(filled) or bool(overlapping_pairs(filled))


def overlapping_pairs(places: Sequence[Box]) -> list[tuple[int, int]]:
    """Find pairs of different, non-empty shards that share an element, the smaller index first.

    A sweep along the axis with most starts compares only shards that are open at the same time.
    """
    if len(places) < 2 or not places[0][0]:
        return []
    first = places[0][1]
    if all(
        shape == first and all(start % size == 0 for start, size in zip(offset, shape, strict=True))
        for offset, shape in places
    ):
        return []  # a regular grid
    axis = max(range(len(places[0][0])), key=lambda a: len({offset[a] for offset, _ in places}))
    pairs: list[tuple[int, int]] = []
    still_open: list[tuple[int, int]] = []
    for index in sorted(range(len(places)), key=lambda i: places[i][0][axis]):
        offset, shape = places[index]
        while still_open and still_open[0][0] <= offset[axis]:
            heappop(still_open)
        for _, other in still_open:
            if _share_an_element(places[index], places[other]):
                pairs.append((min(index, other), max(index, other)))
        heappush(still_open, (offset[axis] + shape[axis], index))
    return sorted(pairs)


def _share_an_element(first: Box, second: Box) -> bool:
    return all(
        start < other + other_size and other < start + size
        for start, size, other, other_size in zip(*first, *second, strict=True)
    )
