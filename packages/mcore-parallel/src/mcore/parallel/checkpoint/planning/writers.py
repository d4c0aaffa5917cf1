"""The choice of the rank that writes a replica, and the check that replicas are equal."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.planning.staging import digest_of
from mcore.parallel.checkpoint.sharded import ShardedTensor, is_main_replica
from mcore.parallel.checkpoint.state_tree import Entries, is_bare
from mcore.parallel.checkpoint.team import Team
from mcore.parallel.shortened import ranks_text, titled_list
from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor

_NOT_WRITTEN = (0, 0, 1)


class _Holding(NamedTuple):
    """The values of a rank that others may hold too."""

    common: dict[str, str]  # name to dtype and shape of a tensor, else an empty text
    bare: list[str]  # names of bare shards, see :func:`_list_bare_shards`
    num_bytes: list[int]  # of each shard in ``bare``


class _Decision(NamedTuple):
    """The first rank's decision about the values of a rank."""

    common: list[str]  # names of leaves to write
    not_written: list[int]  # positions in ``bare``
    compared: list[int]  # positions in ``bare`` of shards that several ranks hold
    is_compared: bool  # whether any rank compares, which all ranks must know


def choose_writers(entries: Entries, team: Team, *, check_replicas: bool) -> Entries:
    """Return the entries with this rank's writes chosen: each value is written by one rank.

    Collective over the team. A common leaf is written by the first rank that has it. The replicas
    of a bare tensor on other ranks are unknown: they must hold equal bytes, and the rank with the
    fewest bytes to write writes one. ``check_replicas`` compares all values of several ranks.
    """
    if team.group is None:
        return replace(entries, written=frozenset(entries.common))
    bare = team.agree(lambda: _list_bare_shards(entries, team))
    holding = _Holding(
        {name: _describe_tensor(value) for name, (_, value) in entries.common.items()},
        [_name_shard(shard) for _, shard in bare],
        [prod(shard.local_shape) * shard.dtype.itemsize for _, shard in bare],
    )
    gathered = team.gather_bytes(_pack(holding))
    decisions = team.agree(lambda: _decide(gathered, check_replicas))
    decision = _Decision(*json.loads(team.scatter_bytes([_encode_json(one) for one in decisions])))
    if decision.is_compared:
        compared = [bare[place][1] for place in decision.compared]
        digests = team.agree(lambda: _compute_digests(entries, compared, check_replicas))
        packed = team.gather_bytes(_pack(digests))
        team.agree(lambda: _raise_if_different(packed))
    tensors = list(entries.tensors)
    for place in decision.not_written:
        at, shard = bare[place]
        tensors[at] = (tensors[at][0], replace(shard, replica_id=_NOT_WRITTEN))
    return replace(entries, tensors=tensors, written=frozenset(decision.common))


def _pack(value: Any) -> bytes:
    return zlib.compress(_encode_json(value), 1)


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _list_bare_shards(entries: Entries, team: Team) -> list[tuple[int, ShardedTensor]]:
    """List, with their positions, the shards that ranks outside their mesh may hold too."""
    return [
        (at, shard)
        for at, (_, shard) in enumerate(entries.tensors)
        if is_bare(shard)
        and is_main_replica(shard.replica_id)
        and prod(shard.local_shape) > 0
        and (shard.data.device_mesh.size() if is_dtensor(shard.data) else 1) < team.size
    ]


def _describe_tensor(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"dtype {str(value.dtype).removeprefix('torch.')} shape {tuple(value.shape)}"


def _name_shard(shard: ShardedTensor) -> str:
    return f"{shard.key!r}, offset {shard.global_offset} shape {shard.shard_shape}"


def _decide(gathered: Sequence[bytes], check_replicas: bool) -> list[_Decision]:
    """Decide for all ranks. Only the first rank gets their holdings."""
    # Ranks of one layout often send equal bytes, which are unpacked once.
    unpacked = {one: _Holding(*json.loads(zlib.decompress(one))) for one in set(gathered)}
    ranks = [unpacked[one] for one in gathered]
    common = _assign_common([rank.common for rank in ranks])
    holders: dict[str, list[tuple[int, int]]] = {}
    for number, rank in enumerate(ranks):
        for place, name in enumerate(rank.bare):
            holders.setdefault(name, []).append((number, place))
    shared = [found for found in holders.values() if len(found) > 1]
    is_compared = check_replicas or bool(shared)
    decisions = [_Decision(names, [], [], is_compared) for names in common]
    # Greedy balance: the largest shard first, each to the holder with the fewest bytes so far.
    load = [0] * len(ranks)
    for found in sorted(shared, key=lambda one: -ranks[one[0][0]].num_bytes[one[0][1]]):
        writer = min(found, key=lambda holder: load[holder[0]])
        load[writer[0]] += ranks[writer[0]].num_bytes[writer[1]]
        for number, place in found:
            decisions[number].compared.append(place)
            if number != writer[0]:
                decisions[number].not_written.append(place)
    return decisions


def _assign_common(ranks: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """List, per rank, the common leaves that no earlier rank has. Their kinds must be equal."""
    kinds: dict[str, tuple[int, str]] = {}
    assigned: list[list[str]] = []
    problems: dict[str, str] = {}
    known: dict[int, Mapping[str, str]] = {}  # by id: equal ranks share an unpacked object
    for number, leaves in enumerate(ranks):
        assigned.append([])
        if id(leaves) in known:
            continue
        known[id(leaves)] = leaves
        for name, kind in leaves.items():
            if name not in kinds:
                kinds[name] = (number, kind)
                assigned[-1].append(name)
            elif kinds[name][1] != kind:
                first, other = kinds[name]
                problems.setdefault(
                    name,
                    f"{name!r}: {other or 'no tensor'} on rank {first}, "
                    f"{kind or 'no tensor'} on rank {number}",
                )
    if problems:
        title = (
            "ranks hold different things under one key, of which only one could be saved. Give "
            "each a separate key, or describe shards by ShardedTensor"
        )
        raise CheckpointingException(titled_list(title, list(problems.values())))
    return assigned


def _compute_digests(
    entries: Entries, compared: Iterable[ShardedTensor], check_replicas: bool
) -> dict[str, str]:
    if not check_replicas:
        return {_name_shard(shard): _compute_digest(shard.data) for shard in compared}
    digests = {
        _name_shard(shard): _compute_digest(shard.data)
        for _, shard in entries.tensors
        if shard.data is not None and prod(shard.local_shape) > 0
    }
    for _, obj in entries.objects:
        if obj.data is not None:
            digests[repr(obj.unique_key)] = digest_of(obj.data).hex()
    for name, (_, value) in entries.common.items():
        digests[repr(name)] = digest_of(value).hex()
    return digests


def _compute_digest(tensor: Any) -> str:
    return digest_of(to_local_if_dtensor(tensor).detach().as_subclass(torch.Tensor)).hex()


def _raise_if_different(packed: Sequence[bytes]) -> None:
    found: dict[str, dict[str, list[int]]] = {}
    for rank, one in enumerate(packed):
        for name, digest in json.loads(zlib.decompress(one)).items():
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
