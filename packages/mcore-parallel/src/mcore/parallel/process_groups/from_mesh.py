"""Collection of every process group from named device meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.process_groups.from_sizes import GroupMaker
from mcore.parallel.process_groups.layout import (
    DENSE_FIELDS,
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    GROUP_FIELDS,
    Layout,
    embedding_lists,
    require_equal_pipelines,
)
from mcore.parallel.torch_compat import flatten_mesh

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_ONLY_AXES = ("ep", "expt_dp", "expt_tp")


@dataclass(frozen=True)
class _View:
    """A mesh whose dimensions are known under the names of fields."""

    mesh: DeviceMesh
    layout: Layout
    dims: dict[str, str]  # axis of the layout -> dimension of the mesh

    @classmethod
    def of(cls, mesh: DeviceMesh, dim_of_field: Mapping[str, str]) -> _View:
        field_of_dim = {dim: field for field, dim in dim_of_field.items()}
        names = mesh.mesh_dim_names or ()
        axes = [field_of_dim.get(name, f"dimension {name}") for name in names]
        layout = Layout(tuple(axes), mesh.mesh)
        return cls(mesh, layout, dict(zip(axes, names, strict=True)))


def groups_from_mesh(
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    names: Mapping[str, str] | None,
    wanted: Sequence[str],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> dict[str, Any]:
    """Take the groups of the meshes' dimensions and create the wanted composites of them.
    Collective on the world group; all ranks pass the same arguments.
    """
    dense, expert = _views(mesh, expert_mesh, names or {})
    if expert is not None:
        require_equal_pipelines(dense.layout, expert.layout, "the meshes")
    maker = GroupMaker()
    for view in (dense, expert):
        if view is not None:
            _adopt_dimensions(view, maker)
    made: dict[str, Any] = {"dense_mesh": mesh, "expert_mesh": expert_mesh}
    for name in GROUP_FIELDS:
        if name in wanted:
            made[name] = _field(name, dense, expert, maker, choices)
    for given in (mesh, expert_mesh):
        if given is not None and not _contains_this_rank(given):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh over ranks {given.mesh.tolist()}; "
                "only its members can use the groups"
            )
    return made


def _views(
    mesh: DeviceMesh, expert_mesh: DeviceMesh | None, names: Mapping[str, str]
) -> tuple[_View, _View | None]:
    known = (*DENSE_AXES, *EXPERT_ONLY_AXES)
    for field in names:
        if field not in known:
            raise ValueError(f"names has the unknown field {field!r}; known: {', '.join(known)}")
    dims, expert_dims = _dimension_names(mesh), _dimension_names(expert_mesh)
    for field, dim in names.items():
        if dim not in dims + expert_dims:
            raise ValueError(
                f"names maps {field} to {dim!r}, which no mesh has; the dense mesh has {dims}, "
                f"the expert mesh {expert_dims}"
            )
    wanted = {field: names.get(field, field) for field in known}
    here = _select(wanted, DENSE_AXES if expert_mesh is not None else known, dims)
    if expert_mesh is not None:
        there = _select(wanted, ("pp", *EXPERT_ONLY_AXES), expert_dims)
        return _View.of(mesh, here), _View.of(expert_mesh, there)
    dense = _View.of(mesh, here)
    return dense, dense if any(field in here for field in EXPERT_ONLY_AXES) else None


def _dimension_names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    if mesh is None:
        return ()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise ValueError(
            f"the mesh {tuple(mesh.shape)} has no dimension names; pass mesh_dim_names when "
            'making it, such as ("pp", "dp", "cp", "tp")'
        )
    return tuple(mesh.mesh_dim_names)


def _select(
    wanted: Mapping[str, str], fields: Sequence[str], dims: Sequence[str]
) -> dict[str, str]:
    return {field: wanted[field] for field in fields if wanted[field] in dims}


def _contains_this_rank(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def _adopt_dimensions(view: _View, maker: GroupMaker) -> None:
    inside = _contains_this_rank(view.mesh)
    for index, axis in enumerate(view.layout.axes):
        group = view.mesh.get_group(index) if inside else None
        maker.adopt(view.layout.lists([axis]), group)


def _field(
    name: str,
    dense: _View,
    expert: _View | None,
    maker: GroupMaker,
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> dist.ProcessGroup | None:
    view = expert if name in EXPERT_FIELDS else dense
    if view is None:
        return None
    axes = {**DENSE_FIELDS, **EXPERT_FIELDS}.get(name, ("pp",))
    present = view.layout.present(axes)
    if not present:
        return None
    if name in EMBEDDING_FIELDS:
        lists = embedding_lists(view.layout.lists(["pp"]), choices[name], name)
        return _enumerated(name, lists, view, maker)
    lists = view.layout.lists(present)
    if not maker.knows(lists):
        flat = flatten_mesh(view.mesh[tuple(view.dims[axis] for axis in present)], name)
        if flat is not None:
            maker.adopt(lists, flat.get_group() if _contains_this_rank(view.mesh) else None)
    return _enumerated(name, lists, view, maker)


def _enumerated(
    name: str, lists: list[list[int]], view: _View, maker: GroupMaker
) -> dist.ProcessGroup | None:
    world = dist.get_world_size()
    if not maker.knows(lists) and view.mesh.mesh.numel() != world:
        # A slice shows only this rank's part: the ranks outside would create other groups.
        raise ValueError(
            f"cannot create {name} from a mesh over {view.mesh.mesh.numel()} of {world} ranks; "
            f"pass a mesh over the whole world, or leave {name} out with groups=(...)"
        )
    return maker.group_of(lists, f"mcore_{name}")
