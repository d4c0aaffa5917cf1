"""The ranks of a group that hold copies of the same shard of a DTensor."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from mcore.tensor.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class ShardSlots(NamedTuple):
    """The different shards of a tensor in a group, as places that are compared one by one."""

    num_shards: int = 1
    own: int | None = 0  # the place of this rank's shard; None where it holds none
    has_replicas: bool = True
    layout: str = ""  # equal on ranks with equal places; empty for what all ranks hold whole


_WHOLE = ShardSlots()


class ShardSlotFinder:
    """Tells the copies of a tensor in a group from its other shards."""

    # Ranks outside this rank's mesh are in other meshes, which are assumed to be laid out
    # alike: a tensor sharded over tensor-parallel meshes has its copies across these meshes.

    def __init__(self, group_ranks: Collection[int]) -> None:
        self._group_ranks = frozenset(group_ranks)
        self._found: dict[tuple[DeviceMesh, tuple[Placement, ...]], ShardSlots] = {}

    def slots(self, tensor: torch.Tensor) -> ShardSlots:
        """Return the places of a tensor's shards, the same on all ranks but for ``own``."""
        if not is_dtensor(tensor):
            return _WHOLE
        key = (tensor.device_mesh, tuple(tensor.placements))
        if key not in self._found:
            self._found[key] = self._find(*key)
        return self._found[key]

    def _find(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> ShardSlots:
        places = product(*map(range, mesh.shape))
        in_group = {
            _cut_coordinates(place, placements)
            for rank, place in zip(mesh.mesh.flatten().tolist(), places, strict=True)
            if rank in self._group_ranks
        }
        shards = sorted(in_group)
        coordinate = mesh.get_coordinate()
        own = None if coordinate is None else shards.index(_cut_coordinates(coordinate, placements))
        digest = hashlib.sha1(repr(shards).encode(), usedforsecurity=False).hexdigest()
        return ShardSlots(
            num_shards=len(shards),
            own=own,
            has_replicas=len(shards) < len(self._group_ranks),
            layout=f"mesh {tuple(mesh.shape)} {placements}, shards {digest}",
        )


def _cut_coordinates(coordinate: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Keep the coordinates along the mesh dimensions that do not replicate."""
    return tuple(
        place
        for place, placement in zip(coordinate, placements, strict=True)
        if not placement.is_replicate()
    )
