"""Copies of one piece on several ranks: which of them is written, and whether they are equal."""

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
    """What a rank holds that others may hold too."""

    common: dict[str, str]  # name to dtype and shape of a tensor, or nothing
    bare: list[str]  # names of shards that ranks outside their mesh may hold too
    num_bytes: list[int]  # of each of these


class _Decision(NamedTuple):
    """What a rank is told about what it holds."""

    common: list[str]  # to write
    not_written: list[int]  # places in ``bare``
    compared: list[int]  # places in ``bare``, of shards that several ranks hold
    is_compared: bool  # whether any rank has such, or was asked to compare all


def choose_writers(entries: Entries, team: Team, *, check_replicas: bool) -> Entries:
    """Return the entries of which this rank writes what no other rank does.

    Collective over the team. Common leaves are written by the first rank that has them, bare
    tensors, which say nothing of other ranks' copies, by one whose share is small; those must hold
    equal bytes. ``check_replicas`` compares all that several ranks hold.
    """
    if team.group is None:
        return replace(entries, own_common=frozenset(entries.common))
    bare = team.agree(lambda: _bare_shards(entries, team))
    gathered = team.gather_bytes(_packed(_holding(entries, bare)))
    decisions = team.agree(lambda: _decisions(gathered, check_replicas))
    decision = _Decision(*json.loads(team.scatter_bytes([_packed_json(one) for one in decisions])))
    if decision.is_compared:
        compared = [bare[place][1] for place in decision.compared]
        digests = team.agree(lambda: _digests(entries, compared, check_replicas))
        packed = team.gather_bytes(_packed(digests))
        team.agree(lambda: _raise_if_different(packed))
    tensors = list(entries.tensors)
    for place in decision.not_written:
        at, shard = bare[place]
        tensors[at] = (tensors[at][0], replace(shard, replica_id=_NOT_WRITTEN))
    return replace(entries, tensors=tensors, own_common=frozenset(decision.common))


def _packed(value: Any) -> bytes:
    return zlib.compress(_packed_json(value), 1)


def _packed_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bare_shards(entries: Entries, team: Team) -> list[tuple[int, ShardedTensor]]:
    """List, with their place, the shards that ranks outside their mesh may hold too."""
    return [
        (at, shard)
        for at, (_, shard) in enumerate(entries.tensors)
        if is_bare(shard)
        and is_main_replica(shard.replica_id)
        and prod(shard.local_shape) > 0
        and _mesh_size(shard.data) < team.size
    ]


def _mesh_size(tensor: Any) -> int:
    return int(tensor.device_mesh.size()) if is_dtensor(tensor) else 1


def _holding(entries: Entries, bare: Sequence[tuple[int, ShardedTensor]]) -> _Holding:
    return _Holding(
        {name: _tensor_text(value) for name, (_, value) in entries.common.items()},
        [_shard_name(shard) for _, shard in bare],
        [prod(shard.local_shape) * shard.dtype.itemsize for _, shard in bare],
    )


def _tensor_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"dtype {str(value.dtype).removeprefix('torch.')} shape {tuple(value.shape)}"


def _shard_name(shard: ShardedTensor) -> str:
    return f"{shard.key!r}, offset {shard.global_offset} shape {shard.shard_shape}"


def _decisions(gathered: Sequence[bytes], check_replicas: bool) -> list[_Decision]:
    """Decide for all ranks, on the first one; nothing on the others."""
    unpacked = {one: _Holding(*json.loads(zlib.decompress(one))) for one in set(gathered)}
    ranks = [unpacked[one] for one in gathered]
    common = _first_holders([rank.common for rank in ranks])
    holders: dict[str, list[tuple[int, int]]] = {}
    for number, rank in enumerate(ranks):
        for place, name in enumerate(rank.bare):
            holders.setdefault(name, []).append((number, place))
    shared = [found for found in holders.values() if len(found) > 1]
    is_compared = check_replicas or bool(shared)
    decisions = [_Decision(own, [], [], is_compared) for own in common]
    load = [0] * len(ranks)
    for found in sorted(shared, key=lambda one: -ranks[one[0][0]].num_bytes[one[0][1]]):
        writer = min(found, key=lambda holder: load[holder[0]])
        load[writer[0]] += ranks[writer[0]].num_bytes[writer[1]]
        for number, place in found:
            decisions[number].compared.append(place)
            if number != writer[0]:
                decisions[number].not_written.append(place)
    return decisions


def _first_holders(ranks: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """List, per rank, the common leaves that no earlier rank has; tensors must be alike."""
    kinds: dict[str, tuple[int, str]] = {}
    own: list[list[str]] = []
    problems: dict[str, str] = {}
    known: dict[int, Mapping[str, str]] = {}
    for number, leaves in enumerate(ranks):
        own.append([])
        if id(leaves) in known:
            continue
        known[id(leaves)] = leaves
        for name, kind in leaves.items():
            if name not in kinds:
                kinds[name] = (number, kind)
                own[-1].append(name)
            elif kinds[name][1] != kind:
                first, other = kinds[name]
                problems.setdefault(
                    name,
                    f"{name!r}: {other or 'no tensor'} on rank {first}, "
                    f"{kind or 'no tensor'} on rank {number}",
                )
    if problems:
        title = (
            "ranks hold different things under one key, of which only one could be saved; give "
            "each its own key, or describe shards by ShardedTensor"
        )
        raise CheckpointingException(titled_list(title, list(problems.values())))
    return own


def _digests(
    entries: Entries, compared: Iterable[ShardedTensor], check_replicas: bool
) -> dict[str, str]:
    if not check_replicas:
        return {_shard_name(shard): _digest(shard.data) for shard in compared}
    digests = {
        _shard_name(shard): _digest(shard.data)
        for _, shard in entries.tensors
        if shard.data is not None and prod(shard.local_shape) > 0
    }
    for _, obj in entries.objects:
        if obj.data is not None:
            digests[repr(obj.unique_key)] = digest_of(obj.data).hex()
    for name, (_, value) in entries.common.items():
        digests[repr(name)] = digest_of(value).hex()
    return digests


def _digest(tensor: Any) -> str:
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
            "ranks hold different bytes under one key, of which only one copy could be saved; "
            "synchronise them, or give each its own key where they are different things"
        )
        raise CheckpointingException(titled_list(title, problems, "key"))
