"""Which dimensions of a mesh stand for which parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import reject_destroyed
from mcore.parallel.mesh import get_mesh_names
from mcore.parallel.process_groups.layout import DENSE_FIELDS, EXPERT_FIELDS, Layout
from mcore.parallel.torch_compat import flattened_meshes, rank_rows

Dims = tuple[str, ...]
Names = Mapping[str, Dims]

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_ONLY_AXES = ("ep", "expt_dp", "expt_tp")
NAMED_FIELDS = (*DENSE_FIELDS, *EXPERT_FIELDS, "embd", "pos_embd", "hcp", "inter_dist_opt")
# The dimensions of torchtitan's, Accelerate's and Lightning's meshes that are one parallelism.
_MADE_OF = {
    "dp": (
        *("dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep", "fsdp"),
        *("batch", "data_parallel"),
    ),
    "tp": ("tensor_parallel",),
    "expt_dp": ("dp_replicate", "dp_shard", "efsdp"),
    "expt_tp": ("etp",),
}


@dataclass(frozen=True)
class View:
    """A mesh with the dimensions that each parallelism has in it."""

    argument: str  # of from_mesh
    mesh: DeviceMesh
    layout: Layout  # its axes are the dimensions of the mesh
    known: dict[str, Dims]  # dimensions, and flattened ones with what they consist of
    axes: dict[str, Dims] = field(default_factory=dict)

    def composed(self, axes: Sequence[str]) -> Dims | None:
        """Return the dimensions of several parallelisms in mesh order; None where all lack one."""
        present = [axis for axis in axes if axis in self.axes]
        if not present:
            return None
        return self.layout.present(dim for axis in present for dim in self.axes[axis])

    def map_axes(self, axes: Sequence[str], named: Mapping[str, Dims], made_of: Names) -> None:
        """Give each axis its dimensions: those named, its own, or those that make it up."""
        for axis in axes:
            parts = [part for part in made_of.get(axis, ()) if part in self.layout.axes]
            if axis in named:
                self.axes[axis] = named[axis]
            elif axis in self.known:
                self.axes[axis] = self.known[axis]
            elif parts:
                self.axes[axis] = tuple(parts)

    def left_over(self) -> Dims:
        """List the dimensions that stand for no parallelism."""
        taken = {dim for dims in self.axes.values() for dim in dims}
        return tuple(dim for dim in self.layout.axes if dim not in taken)

    def check(self, example: str) -> None:
        """Raise ValueError for a dimension of several ranks under two names or under none."""
        owner: dict[str, str] = {}
        for axis, dims in self.axes.items():
            for dim in dims:
                if self.layout.size(dim) > 1 and dim in owner:
                    raise ValueError(
                        f"dimension {dim!r} of {self.argument} stands for {owner[dim]} and for "
                        f"{axis}; give it one name with names={{...}}"
                    )
                owner[dim] = axis
        lost = [dim for dim in self.left_over() if self.layout.size(dim) > 1]
        if lost:
            shown = ", ".join(f"{dim!r} ({self.layout.size(dim)} ranks)" for dim in lost)
            mapped = (*self.axes.get(example, ()), lost[0])
            raise ValueError(
                f"{self.argument} {self.layout.axes} has dimensions that stand for no parallelism, "
                f"so that their ranks would be taken for one: {shown}; map each, such as with "
                f"names={{{example!r}: {mapped!r}}}"
            )


def views_of(
    mesh: DeviceMesh, expert_mesh: DeviceMesh | None, names: Mapping[str, str | Sequence[str]]
) -> tuple[View, View | None, dict[str, list[Dims]]]:
    """Map the dimensions of one or two meshes; return the views and what names stand for."""
    dense = _view_of("mesh", mesh)
    other = None if expert_mesh is None else _view_of("expert_mesh", expert_mesh)
    levels = {name: _named_dims(name, value, dense, other) for name, value in names.items()}
    named = {name: tuple(dim for dims in parts for dim in dims) for name, parts in levels.items()}
    dense.map_axes(DENSE_AXES, named, _MADE_OF)
    if other is not None:
        its_names = {name: dims for name, dims in named.items() if name in EXPERT_ONLY_AXES}
        if "pp" in named and set(named["pp"]) <= set(other.layout.axes):
            its_names["pp"] = named["pp"]
        other.map_axes(("pp", *EXPERT_ONLY_AXES), its_names, _MADE_OF)
        other.check("expt_dp")
        dense.check("dp")
        return dense, other, levels
    expert = replace(dense, axes={})
    expert.map_axes(EXPERT_ONLY_AXES, named, {"expt_tp": _MADE_OF["expt_tp"]})
    is_mixed = bool(expert.axes) and any(axis in dense.axes for axis in ("tp", "cp", "dp"))
    if is_mixed:
        _share_one_mesh(dense, expert, "dp" in named or "dp" in dense.known)
    if is_mixed or not expert.axes:
        dense.check("dp")
    if not expert.axes:
        return dense, None, levels
    expert.axes.update({"pp": dense.axes["pp"]} if "pp" in dense.axes else {})
    if is_mixed and "expt_dp" not in expert.axes:
        expert.axes["expt_dp"] = expert.left_over()
    expert.check("expt_dp")
    return dense, expert, levels


def _share_one_mesh(dense: View, expert: View, has_dp: bool) -> None:
    """Complete both views of a mesh: experts are spread over ranks that copy the dense layers."""
    if not has_dp and "ep" in dense.layout.axes:
        dense.axes["dp"] = (*dense.axes.get("dp", ()), "ep")
    tp = dense.axes.get("tp")
    is_in_ep = set(tp or ()) & set(expert.axes.get("ep", ()))
    if tp is not None and "expt_tp" not in expert.axes and not is_in_ep:
        expert.axes["expt_tp"] = tp


def _view_of(argument: str, mesh: DeviceMesh) -> View:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {type(mesh).__name__}")
    reject_destroyed(mesh)
    if not mesh.mesh_dim_names:
        raise ValueError(
            f"the mesh {tuple(mesh.shape)} has no dimension names; pass mesh_dim_names when "
            'making it, such as ("pp", "dp", "cp", "tp")'
        )
    layout = Layout(tuple(mesh.mesh_dim_names), mesh.mesh)
    known: dict[str, Dims] = {dim: (dim,) for dim in layout.axes}
    flattened = flattened_meshes(mesh)
    for name in get_mesh_names(mesh):
        dims = None if name in known else _dims_of(flattened[name], layout)
        if dims is not None:
            known[name] = dims
    return View(argument, mesh, layout, known)


def _dims_of(flat: DeviceMesh, layout: Layout) -> Dims | None:
    """Return the dimensions that a flattened one consists of, by its ranks; None if of parts."""
    several = [dim for dim in layout.axes if layout.size(dim) > 1]
    one = int(layout.ranks.flatten()[0])
    ranks = next((sorted(row) for row in rank_rows(flat) if one in row), [])
    for number in range(len(several) + 1):
        for dims in combinations(several, number):
            if prod(map(layout.size, dims)) == len(ranks) and ranks in layout.lists(dims):
                return dims
    return None


def _named_dims(
    name: str, value: str | Sequence[str], dense: View, expert: View | None
) -> list[Dims]:
    if name not in NAMED_FIELDS:
        raise ValueError(f"names has the unknown field {name!r}; known: {', '.join(NAMED_FIELDS)}")
    view = expert if expert is not None and name in EXPERT_FIELDS else dense
    parts = []
    for dim in (value,) if isinstance(value, str) else value:
        if dim not in view.known:
            raise ValueError(
                f"names maps {name} to {dim!r}, which {view.argument} does not have; it has "
                f"{', '.join(view.known)}"
            )
        parts.append(view.known[dim])
    all_dims = [dim for dims in parts for dim in dims]
    if len(set(all_dims)) != len(all_dims):
        raise ValueError(f"names maps {name} to {value!r}, in which a dimension appears twice")
    return parts
