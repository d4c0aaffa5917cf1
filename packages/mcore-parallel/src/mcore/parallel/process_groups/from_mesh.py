"""Collection of every process group from named device meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.process_groups.creation import GroupMaker, GroupSettings, SharedGroup, agreed
from mcore.parallel.process_groups.layout import (
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    FIELD_AXES,
    Layout,
    embedding_lists,
    require_equal_pipelines,
)
from mcore.parallel.process_groups.mesh_axes import Dims, View, views_of
from mcore.parallel.torch_compat import (
    flatten_mesh,
    flattened_meshes,
    root_mesh,
    set_group_timeout,
)


@dataclass(frozen=True)
class _Part:
    """One group to take or to make: its view, the dimensions it spans, and all its rank lists."""

    view: View
    dims: Dims
    lists: list[list[int]]
    is_whole: bool = True  # all ranks along the dimensions, as the flattened mesh has


@dataclass(frozen=True)
class MeshPlan:
    """The groups of one or two meshes, worked out alike on every rank before any is made."""

    views: list[View]
    parts: dict[str, list[_Part]]  # by field, only hcp has several
    facts: dict[str, object]  # the arguments, equal on all ranks


def plan_mesh(
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    names: Mapping[str, str | Sequence[str]],
    wanted: Sequence[str],
    is_chosen: bool,
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> MeshPlan:
    """Work out the wanted groups and check the arguments; no communication."""
    dense, expert, named = views_of(mesh, expert_mesh, names)
    if expert is not None and expert_mesh is not None:
        require_equal_pipelines(_pipelines(dense), _pipelines(expert), "the meshes")
    if is_chosen and "hcp" in wanted and "hcp" not in named:
        raise ValueError(
            'groups names hcp, whose levels are not known: pass names={"hcp": (...)}, innermost '
            "first, or use from_sizes(hcp_sizes=...)"
        )
    parts = {}
    for name in (*wanted, *(["inter_dist_opt"] if "inter_dist_opt" in named else [])):
        view = expert if name in EXPERT_FIELDS else dense
        if view is not None:
            parts[name] = _parts(name, view, named, choices)
    embedding = {name: [part.lists for part in parts.get(name, [])] for name in EMBEDDING_FIELDS}
    facts: dict[str, object] = {
        "mesh": _mesh_facts(mesh),
        "expert_mesh": None if expert_mesh is None else _mesh_facts(expert_mesh),
        "names": {name: list(named[name]) for name in sorted(names)},
        "groups": ", ".join(wanted),
        "embedding_ranks": embedding["embd"] if _covers_world(dense) else None,
        "position_embedding_ranks": embedding["pos_embd"] if _covers_world(dense) else None,
    }
    views = [dense, *([] if expert is None else [expert])]
    return MeshPlan(views, parts, facts)


def _pipelines(view: View) -> Layout:
    """Return the layout with its pipeline dimensions as one axis that is called pp."""
    lists = view.layout.lists(view.axes.get("pp", ()))
    return Layout(("stages", "pp"), torch.tensor(lists))


def _mesh_facts(mesh: DeviceMesh) -> str:
    """Return what is equal on all ranks that were given the same mesh or its parallel slices."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return f"{sizes} of ranks {root_mesh(mesh).mesh.tolist()}"


def _parts(
    name: str,
    view: View,
    named: Mapping[str, list[Dims]],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> list[_Part]:
    if name in named and name not in view.axes:
        every = named[name] if name == "hcp" else [tuple(d for dims in named[name] for d in dims)]
        return [_Part(view, dims, view.layout.lists(dims)) for dims in every]
    dims = view.composed(FIELD_AXES.get(name, ()))
    if dims is None:
        return []
    lists = view.layout.lists(dims)
    if name not in EMBEDDING_FIELDS:
        return [_Part(view, dims, lists)]
    return [_Part(view, dims, embedding_lists(lists, choices[name], name), is_whole=False)]


def groups_from_mesh(
    make_plan: Callable[[], tuple[MeshPlan, GroupSettings]],
) -> tuple[dict[str, Any], list[SharedGroup]]:
    """Take the groups of the meshes' dimensions and create the wanted composites of them.
    Collective on the world group: one all-reduce (MAX of 64 int64), then creation in one order.
    """
    plan, settings = agreed(make_plan, lambda made: {**made[0].facts, **made[1].facts()})
    maker = GroupMaker(settings, share=all(_covers_world(view) for view in plan.views))
    for view in plan.views:
        _adopt(view, maker)
    made: dict[str, Any] = {"dense_mesh": plan.views[0].mesh}
    if plan.views[-1].mesh is not plan.views[0].mesh:
        made["expert_mesh"] = plan.views[-1].mesh
    for name, parts in plan.parts.items():
        groups = [_group(name, part, maker, settings) for part in parts]
        if groups:
            made[name] = groups if name == "hcp" else groups[0]
    for view in plan.views:
        if not _contains_this_rank(view.mesh):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh over ranks {view.mesh.mesh.tolist()}; "
                "only its members can use the groups"
            )
    return made, list(maker.used.values())


def _contains_this_rank(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def _covers_world(view: View) -> bool:
    return view.mesh.mesh.numel() == dist.get_world_size()


def _adopt(view: View, maker: GroupMaker) -> None:
    """Remember the groups of the dimensions, flattened ones included."""
    inside = _contains_this_rank(view.mesh)
    flattened = flattened_meshes(view.mesh)
    for name, dims in view.known.items():
        group = None
        if inside:
            flat = flattened.get(name) if name not in view.layout.axes else None
            group = view.mesh.get_group(name) if flat is None else flat.get_group()
        if not _is_disabled(group):
            maker.adopt(view.layout.lists(dims), group)


def _is_disabled(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group of several ranks moves nothing: torchtitan's for unused dimensions."""
    if group is None or group.size() == 1 or dist.get_backend() == "fake":
        return False
    return dist.get_backend(group) == "fake"


def _group(
    name: str, part: _Part, maker: GroupMaker, settings: GroupSettings
) -> dist.ProcessGroup | None:
    view, lists = part.view, part.lists
    is_special = settings.timeout or settings.backend or name in settings.options
    if part.is_whole and part.dims and not is_special and not maker.knows(lists, name):
        flat = flatten_mesh(view.mesh[part.dims], name)
        if flat is not None:
            group = flat.get_group() if _contains_this_rank(view.mesh) else None
            if group is not None:
                set_group_timeout(group, maker.timeout)
            maker.adopt(lists, group)
    world, covered = dist.get_world_size(), view.mesh.mesh.numel()
    if not maker.knows(lists, name) and covered != world:
        # A slice shows only this rank's part: the ranks outside would create other groups.
        raise ValueError(
            f"cannot create {name} from a mesh over {covered} of {world} ranks; "
            f"pass a mesh over the whole world, or leave {name} out with groups=(...)"
        )
    return maker.group_of(lists, name)
