"""Collection of every process group from named device meshes.

:func:`map_meshes` finds the dimensions of each axis of parallelism, :func:`plan_mesh` the ranks of
every wanted group, and :func:`groups_from_mesh` reuses existing groups and creates the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import reject_destroyed
from mcore.parallel.mesh import get_mesh_names
from mcore.parallel.process_groups.creation import (
    GroupMaker,
    GroupSettings,
    Uses,
    agree_on_plan,
)
from mcore.parallel.process_groups.layout import (
    DENSE_FIELDS,
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    FIELD_AXES,
    Choose,
    Layout,
    RankLists,
    embedding_lists,
    require_equal_pipelines,
)
from mcore.parallel.torch_compat import (
    flatten_mesh,
    flattened_meshes,
    rank_rows,
    root_mesh,
    set_group_timeout,
)

Dims = tuple[str, ...]

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("pp", "ep", "expt_dp", "expt_tp")
NAMED_FIELDS = (*DENSE_FIELDS, *EXPERT_FIELDS, "embd", "pos_embd", "hcp", "inter_dist_opt")
# The dimensions that form an axis in the meshes of each library, if no dimension has the name of
# the axis. Dimensions form the same axis in all libraries, so a mesh is searched for all of them.
KNOWN_SCHEMES: dict[str, dict[str, Dims]] = {
    "torchtitan": {
        "dp": ("dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep", "fsdp", "batch"),
        "expt_dp": ("dp_replicate", "dp_shard", "efsdp"),
        "expt_tp": ("etp",),
    },
    "Accelerate": {"dp": ("dp_replicate", "dp_shard")},
    "Lightning": {"dp": ("data_parallel",), "tp": ("tensor_parallel",)},
}


@dataclass(frozen=True)
class MappedMesh:
    """A mesh with the dimensions of each axis of parallelism in it."""

    argument: str  # of from_mesh
    mesh: DeviceMesh
    layout: Layout  # its axes are the dimensions of the mesh
    known: dict[str, Dims]  # dimensions, and flattened dimensions with their parts
    axes: dict[str, Dims] = field(default_factory=dict)

    @property
    def contains_this_rank(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.mesh.get_coordinate() is not None

    @property
    def covers_world(self) -> bool:
        """Whether all ranks are in the mesh."""
        return self.mesh.mesh.numel() == dist.get_world_size()

    def combine(self, axes: Sequence[str]) -> Dims | None:
        """Return the dimensions of several axes in mesh order, or None if the mesh has no axis."""
        present = [self.axes[axis] for axis in axes if axis in self.axes]
        return self.layout.present([dim for dims in present for dim in dims]) if present else None

    def find_axes(
        self, axes: Sequence[str], named: Mapping[str, Dims], by_scheme: Collection[str]
    ) -> None:
        """Map each axis to its named dimensions, else to the dimension of its name, else by scheme.
        Only the axes in ``by_scheme`` are looked up in the known schemes.
        """
        for axis in axes:
            schemes = KNOWN_SCHEMES.values() if axis in by_scheme else ()
            parts = self.layout.present([dim for scheme in schemes for dim in scheme.get(axis, ())])
            dims = named.get(axis, self.known.get(axis, parts or None))
            if dims is not None:
                self.axes[axis] = dims

    def list_unmapped(self) -> Dims:
        """Return the dimensions that belong to no axis."""
        taken = {dim for dims in self.axes.values() for dim in dims}
        return tuple(dim for dim in self.layout.axes if dim not in taken)

    def check(self, example: str) -> None:
        """Raise ValueError if a dimension of several ranks belongs to two axes or to none."""
        owner: dict[str, str] = {}
        for axis, dims in self.axes.items():
            for dim in dims:
                if self.layout.size(dim) > 1 and dim in owner:
                    raise ValueError(
                        f"dimension {dim!r} of {self.argument} stands for {owner[dim]} and for "
                        f"{axis}: assign it to one of them with names={{...}}"
                    )
                owner[dim] = axis
        unmapped = [dim for dim in self.list_unmapped() if self.layout.size(dim) > 1]
        if unmapped:
            listed = ", ".join(f"{dim!r} ({self.layout.size(dim)} ranks)" for dim in unmapped)
            mapped = (*self.axes.get(example, ()), unmapped[0])
            raise ValueError(
                f"{self.argument} {self.layout.axes} has dimensions that stand for no parallelism: "
                f"{listed}. Map each of them, for example with names={{{example!r}: {mapped!r}}}"
            )


def map_meshes(
    mesh: DeviceMesh, expert_mesh: DeviceMesh | None, names: Mapping[str, str | Sequence[str]]
) -> tuple[MappedMesh, MappedMesh | None, dict[str, list[Dims]]]:
    """Map the axes of the dense layers and of the experts, if there are any, to dimensions.
    Return both, and the dimensions of each name. Both may be mapped to one mesh.
    """
    dense = _read_mesh("mesh", mesh)
    if expert_mesh is None:
        expert = replace(dense, axes={})
    else:
        expert = _read_mesh("expert_mesh", expert_mesh)
    levels = {
        name: _resolve_name(name, value, expert if name in EXPERT_FIELDS else dense)
        for name, value in names.items()
    }
    named = {name: tuple(dim for dims in parts for dim in dims) for name, parts in levels.items()}
    dense.find_axes(DENSE_AXES, named, DENSE_AXES)
    # pp may have been named by dimensions that only the dense mesh has.
    inside = {name: dims for name, dims in named.items() if set(dims) <= set(expert.layout.axes)}
    if expert_mesh is not None:
        expert.find_axes(EXPERT_AXES, inside, EXPERT_AXES)
        expert.check("expt_dp")
        dense.check("dp")
        return dense, expert, levels
    # In a shared mesh the schemes would find the dimensions of dp for expt_dp: see below.
    expert.find_axes(EXPERT_AXES, inside, ["expt_tp"])
    has_dense = any(axis in dense.axes for axis in ("tp", "cp", "dp"))
    has_experts = any(axis in expert.axes for axis in ("ep", "expt_dp", "expt_tp"))
    if has_dense and has_experts:
        # Experts are spread over ranks that replicate the dense layers, so ep is a part of dp.
        if "dp" not in named and "dp" not in dense.known and "ep" in dense.layout.axes:
            dense.axes["dp"] = (*dense.axes.get("dp", ()), "ep")
        # Experts are split over tp as the dense layers are, unless tp is a part of ep,
        if "tp" in dense.axes and not set(dense.axes["tp"]) & set(expert.axes.get("ep", ())):
            expert.axes.setdefault("expt_tp", dense.axes["tp"])
        # and are replicated over all remaining dimensions.
        expert.axes.setdefault("expt_dp", expert.list_unmapped())
    if has_dense or not has_experts:
        dense.check("dp")
    if not has_experts:
        return dense, None, levels
    expert.check("expt_dp")
    return dense, expert, levels


def _read_mesh(argument: str, mesh: DeviceMesh) -> MappedMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {type(mesh).__name__}")
    reject_destroyed(mesh)
    if not mesh.mesh_dim_names:
        raise ValueError(
            f"the mesh {tuple(mesh.shape)} has no dimension names: pass mesh_dim_names when "
            'making it, such as ("pp", "dp", "cp", "tp")'
        )
    layout = Layout(tuple(mesh.mesh_dim_names), mesh.mesh)
    known: dict[str, Dims] = {dim: (dim,) for dim in layout.axes}
    flattened = flattened_meshes(mesh)
    for name in get_mesh_names(mesh):
        dims = None if name in known else _find_parts(flattened[name], layout)
        if dims is not None:
            known[name] = dims
    return MappedMesh(argument, mesh, layout, known)


def _find_parts(flat: DeviceMesh, layout: Layout) -> Dims | None:
    """Return the dimensions of a flattened dimension, or None if it has parts of dimensions."""
    # torch does not record them, so the combination with the same ranks is searched.
    several = [dim for dim in layout.axes if layout.size(dim) > 1]
    one = int(layout.ranks.flatten()[0])
    ranks = next((sorted(row) for row in rank_rows(flat) if one in row), [])
    for number in range(len(several) + 1):
        for dims in combinations(several, number):
            if prod(map(layout.size, dims)) == len(ranks) and ranks in layout.lists(dims):
                return dims
    return None


def _resolve_name(name: str, value: str | Sequence[str], mapped: MappedMesh) -> list[Dims]:
    """Return the dimensions of each dimension that an entry of ``names`` lists."""
    if name not in NAMED_FIELDS:
        raise ValueError(f"names has the unknown field {name!r}. Known: {', '.join(NAMED_FIELDS)}")
    parts = []
    for dim in (value,) if isinstance(value, str) else value:
        if dim not in mapped.known:
            raise ValueError(
                f"names maps {name} to {dim!r}, which {mapped.argument} does not have. It has "
                f"{', '.join(mapped.known)}"
            )
        parts.append(mapped.known[dim])
    all_dims = [dim for dims in parts for dim in dims]
    if len(set(all_dims)) != len(all_dims):
        raise ValueError(f"names maps {name} to {value!r}, in which a dimension appears twice")
    return parts


@dataclass(frozen=True)
class _Part:
    """One group to take or to make: its mesh, its dimensions, and the ranks of all its groups."""

    mapped: MappedMesh
    dims: Dims
    lists: RankLists
    is_whole: bool = True  # all ranks along the dimensions, as in a flattened mesh


@dataclass(frozen=True)
class MeshPlan:
    """The groups of one or two meshes, computed equally on every rank before any is made."""

    meshes: list[MappedMesh]
    parts: dict[str, list[_Part]]  # by field, several only for hcp
    facts: dict[str, object]  # the arguments, equal on all ranks


def plan_mesh(
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    names: Mapping[str, str | Sequence[str]],
    wanted: Sequence[str],
    is_chosen: bool,
    choices: Mapping[str, Choose],
) -> MeshPlan:
    """Compute the ranks of the wanted groups and check the arguments. No communication."""
    dense, expert, named = map_meshes(mesh, expert_mesh, names)
    if expert is not None and expert_mesh is not None:
        ours, theirs = (each.layout.rows(each.axes.get("pp", ())) for each in (dense, expert))
        require_equal_pipelines(ours, theirs, "the meshes")
    if is_chosen and "hcp" in wanted and "hcp" not in named:
        raise ValueError(
            'groups names hcp, whose levels are not known: pass names={"hcp": (...)}, innermost '
            "first, or use from_sizes(hcp_sizes=...)"
        )
    parts = {}
    for name in (*wanted, *(["inter_dist_opt"] if "inter_dist_opt" in named else [])):
        mapped = expert if name in EXPERT_FIELDS else dense
        if mapped is not None:
            parts[name] = _plan_field(name, mapped, named, choices)
    embedding = {name: [part.lists for part in parts.get(name, [])] for name in EMBEDDING_FIELDS}
    facts: dict[str, object] = {
        "mesh": _describe_mesh(mesh),
        "expert_mesh": None if expert_mesh is None else _describe_mesh(expert_mesh),
        "names": {name: list(named[name]) for name in sorted(names)},
        "groups": ", ".join(wanted),
        # A slice has only this rank's part of the lists, which differs between ranks.
        "embedding_ranks": embedding["embd"] if dense.covers_world else None,
        "position_embedding_ranks": embedding["pos_embd"] if dense.covers_world else None,
    }
    return MeshPlan([dense, *([] if expert is None else [expert])], parts, facts)


def _describe_mesh(mesh: DeviceMesh) -> str:
    """Return a text that is equal on all ranks with the same mesh or with parallel slices of it."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return f"{sizes} of ranks {root_mesh(mesh).mesh.tolist()}"


def _plan_field(
    name: str, mapped: MappedMesh, named: Mapping[str, list[Dims]], choices: Mapping[str, Choose]
) -> list[_Part]:
    if name in named and name not in mapped.axes:
        levels = named[name] if name == "hcp" else [tuple(d for dims in named[name] for d in dims)]
        return [_Part(mapped, dims, mapped.layout.rows(dims)) for dims in levels]
    dims = mapped.combine(FIELD_AXES.get(name, ()))
    if dims is None:
        return []
    rows = mapped.layout.rows(dims)
    if name not in EMBEDDING_FIELDS:
        return [_Part(mapped, dims, rows)]
    lists = embedding_lists(rows.tolist(), choices[name], name)
    return [_Part(mapped, dims, lists, is_whole=False)]


def groups_from_mesh(
    make_plan: Callable[[], tuple[MeshPlan, GroupSettings]],
) -> tuple[dict[str, Any], Uses]:
    """Take the groups of the meshes' dimensions and create the wanted composites of them.
    Collective on the world group: one all-reduce (MAX of 64 int64), then creation in one order.
    """
    plan, settings = agree_on_plan(make_plan, lambda made: {**made[0].facts, **made[1].facts()})
    dense, expert = plan.meshes[0], plan.meshes[-1]  # one object if there are no experts
    maker = GroupMaker(settings, share=dense.covers_world and expert.covers_world)
    for mapped in plan.meshes:
        flattened = flattened_meshes(mapped.mesh)
        for name, dims in mapped.known.items():
            group = None
            if mapped.contains_this_rank:
                flat = flattened.get(name) if name not in mapped.layout.axes else None
                group = mapped.mesh.get_group(name) if flat is None else flat.get_group()
            # The groups of several ranks that torchtitan does not use are fake.
            is_used = group is None or group.size() == 1 or dist.get_backend(group) != "fake"
            if is_used or dist.get_backend() == "fake":
                maker.adopt(mapped.layout.rows(dims), group)
    made: dict[str, Any] = {"dense_mesh": dense.mesh}
    if expert.mesh is not dense.mesh:
        made["expert_mesh"] = expert.mesh
    for name, parts in plan.parts.items():
        groups = [_take_or_create(name, part, maker, settings) for part in parts]
        if groups:
            made[name] = groups if name == "hcp" else groups[0]
    for mapped in plan.meshes:  # only now, since the other ranks wait for this one until here
        if not mapped.contains_this_rank:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh over ranks "
                f"{mapped.mesh.mesh.tolist()}: only its members can use the groups"
            )
    return made, maker.used


def _take_or_create(
    name: str, part: _Part, maker: GroupMaker, settings: GroupSettings
) -> dist.ProcessGroup | None:
    mapped, lists = part.mapped, part.lists
    is_special = settings.timeout or settings.backend or name in settings.options
    exists = maker.knows(lists, name)
    if not exists and part.is_whole and part.dims and not is_special:
        flat = flatten_mesh(mapped.mesh[part.dims], name)
        if flat is not None:
            group = flat.get_group() if mapped.contains_this_rank else None
            if group is not None:
                set_group_timeout(group, maker.timeout)
            maker.adopt(lists, group)
            exists = True
    if not exists and not mapped.covers_world:
        # A slice has only this rank's part: the ranks outside would create other groups.
        raise ValueError(
            f"cannot create {name} from a mesh over {mapped.mesh.mesh.numel()} of "
            f"{dist.get_world_size()} ranks: pass a mesh over the whole world, or leave {name} "
            "out with groups=(...)"
        )
    return maker.group_of(lists, name)
