"""The meshes and groups of fully sharded data parallelism, checked and in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import require_equal
from mcore.parallel.groups import GroupLike, as_process_group, group_ranks, reject_destroyed
from mcore.parallel.mesh import get_mesh_names, resolve_submesh
from mcore.parallel.shortened import ranks_text
from mcore.parallel.torch_compat import flatten_mesh, is_distributed, root_mesh

_HOW_TO_MAKE = (
    "flatten the two dimensions, keep the result and pass its group: "
    "mesh[{outer!r}, {shard!r}]._flatten(...).get_group(), or make it with "
    "dist.new_group(ranks, sort_ranks=False) for each outer-major list of ranks"
)


class FSDPDistributedIndex:
    """Holds every submesh and process group of fully sharded data parallelism (FSDP).

    Parameters are sharded over the dimension ``dp_shard_dim``. With ``dp_outer_dim`` the index is
    hybrid: an outer dimension replicates the shards (HSDP), or shards them once more with
    ``hsdp_outer_dp_shard``. A submesh serves ``torch.distributed.fsdp.fully_shard`` as it is: that
    of ``dp_shard_dim`` shards, that of ``(dp_outer_dim, dp_shard_dim)`` replicates and shards.

    Construction checks that names, meshes and groups belong together. It does no communication,
    with one exception: where an expert mesh of the whole world has both data-parallel dimensions,
    the ranks compare their arguments (one all-reduce, MAX of 64 int64, over the world group), and
    the group of both is made if no ``hybrid_fsdp_expt_group`` is given and the dense one has other
    ranks. All ranks pass the same arguments.

    Args:
        device_mesh: The mesh of the dense parameters, with dimension names. May be sliced or
            unflattened, in any order of dimensions. Put ``tp_dim`` last where DTensors are
            sharded over both: torch 2.13 cannot reduce them over dimensions in another order.
        dp_shard_dim: The dimension that parameters are sharded over (data and context parallel);
            required. May name a flattened dimension that lies inside the mesh.
        dp_outer_dim: The outer data-parallel dimension, or None.
        tp_dim: The tensor-parallel dimension, or None.
        hybrid_fsdp_group: The ranks of ``(dp_outer_dim, dp_shard_dim)`` in outer-major order, as a
            group or a 1-D mesh; required with ``dp_outer_dim``.
        hsdp_outer_dp_shard: Shard over the outer dimension too: see
            :meth:`get_logical_hybrid_fsdp_rank`.
        expt_device_mesh: The mesh of the expert parameters, with ``dp_shard_dim`` and whichever of
            the other dimensions exist for experts.
        hybrid_fsdp_expt_group: As ``hybrid_fsdp_group`` for the expert mesh.
        fsdp_group_ag: A second group with the ranks of ``dp_shard_dim``, for all-gathers that must
            not wait for reduce-scatters.
        expt_fsdp_group_ag: The same for the expert mesh.

    Attributes:
        device_mesh: As given.
        dp_shard_dim: As given.
        dp_outer_dim: As given.
        tp_dim: As given.
        hsdp_outer_dp_shard: As given.
        expt_device_mesh: As given.
        use_hybrid_fsdp: Whether there is a ``dp_outer_dim``.
        fsdp_group: The group of ``dp_shard_dim``.
        outer_fsdp_group: The group of ``dp_outer_dim``, or None.
        hybrid_fsdp_group: As given.
        fsdp_group_ag: As given.
        expt_fsdp_group: The group of ``dp_shard_dim`` in the expert mesh, or None without one.
        expt_outer_fsdp_group: The group of ``dp_outer_dim`` in the expert mesh, or None.
        hybrid_fsdp_expt_group: As given, or made.
        expt_fsdp_group_ag: As given.
        mesh_library: The registered submeshes: dimension names and whether they are of the expert
            mesh, such as ``("dp_shard", "tp", False)``, to mesh.

    Raises:
        ValueError: A dimension that is missing or overlaps another, a group with other ranks than
            the mesh, or this rank is not in a mesh or group; the text names the argument.
        TypeError: Something other than a DeviceMesh or a group was given.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
        >>> flat = mesh["dp_outer", "dp_shard"]._flatten("hsdp")  # keep what _flatten returns
        >>> index = FSDPDistributedIndex(
        ...     mesh, "dp_shard", "dp_outer", "tp", hybrid_fsdp_group=flat.get_group()
        ... )
        >>> index.get_fsdp_group() is mesh["dp_shard"].get_group()
        True
        >>> index.get_dp_group() is flat.get_group(), index.get_root_mesh() is mesh
        (True, True)
        >>> from torch.distributed.fsdp import fully_shard
        >>> module = torch.nn.Linear(2, 2)
        >>> _ = fully_shard(module, mesh=index.get_submesh(("dp_outer", "dp_shard")))
        >>> module.weight.placements
        (Replicate(), Shard(dim=0))
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: GroupLike | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        *,
        hybrid_fsdp_expt_group: GroupLike | None = None,
        fsdp_group_ag: GroupLike | None = None,
        expt_fsdp_group_ag: GroupLike | None = None,
    ) -> None:
        if not is_distributed():
            raise RuntimeError(
                "FSDPDistributedIndex needs torch.distributed, which is not initialised; "
                "call torch.distributed.init_process_group and make a DeviceMesh first"
            )

        def views() -> tuple[FSDPView, FSDPView | None]:
            dims = dense_dims(device_mesh, dp_shard_dim, dp_outer_dim, tp_dim)
            if hsdp_outer_dp_shard and dp_outer_dim is None:
                raise ValueError("hsdp_outer_dp_shard needs dp_outer_dim, which is None: pass it")
            dense = dense_view(device_mesh, dims, hybrid_fsdp_group, fsdp_group_ag)
            groups = hybrid_fsdp_expt_group, expt_fsdp_group_ag
            if expt_device_mesh is None:
                return dense, None
            return dense, expert_view(expt_device_mesh, dims, dense, *groups)

        if may_create_group(expt_device_mesh, dp_outer_dim):
            arguments = {
                "dp_shard_dim": dp_shard_dim,
                "dp_outer_dim": dp_outer_dim,
                "tp_dim": tp_dim,
                "hsdp_outer_dp_shard": hsdp_outer_dp_shard,
                "hybrid_fsdp_expt_group": "None" if hybrid_fsdp_expt_group is None else "given",
            }
            hybrid = cast("tuple[str, str]", (dp_outer_dim, dp_shard_dim))
            dense, expert = agreed_views(views, arguments, hybrid)
        else:
            dense, expert = views()
        if expert is not None and expert.lacks_hybrid_group:
            raise ValueError(
                f"cannot make a group of (dp_outer_dim, dp_shard_dim) of {expert.mesh}, which is "
                "not of the whole world: pass hybrid_fsdp_expt_group"
            )
        self._dense, self._expert = dense, expert
        self.device_mesh = device_mesh
        self.dp_shard_dim = cast("str", dp_shard_dim)
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.expt_device_mesh = expt_device_mesh
        self.use_hybrid_fsdp = dp_outer_dim is not None
        self.fsdp_group = dense.shard_group
        self.outer_fsdp_group = dense.outer_group
        self.hybrid_fsdp_group = dense.hybrid_group
        self.fsdp_group_ag = dense.gather_group
        self.expt_fsdp_group = None if expert is None else expert.shard_group
        self.expt_outer_fsdp_group = None if expert is None else expert.outer_group
        self.hybrid_fsdp_expt_group = None if expert is None else expert.hybrid_group
        self.expt_fsdp_group_ag = None if expert is None else expert.gather_group
        self.mesh_library: dict[tuple[str | bool, ...], DeviceMesh] = {
            (*names, view is expert): mesh
            for view in (dense, expert)
            if view is not None
            for names, mesh in view.submeshes.items()
        }

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return a registered submesh.

        No communication.

        Args:
            mesh_dim_names: One name or several, in the order of registration: ``tp``,
                ``(outer, shard, tp)``, ``(shard, tp)``, ``(outer, shard)`` or ``shard``, by the
                names that the index was given.
            is_expert_parallel: Take it from the expert mesh.

        Returns:
            The submesh; the same object at every call.

        Raises:
            ValueError: No submesh is registered under these names, or there is no expert mesh.

        Example:
            >>> import torch.distributed as dist
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> FSDPDistributedIndex(mesh, "dp", tp_dim="tp").get_submesh("dp").mesh_dim_names
            ('dp',)
            >>> dist.destroy_process_group()
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names or ()
        view = self._view(is_expert_parallel)
        found = view.submeshes.get(tuple(names))
        if found is not None:
            return found
        registered = ", ".join(str(known) for known in view.submeshes)
        raise ValueError(
            f"no submesh {tuple(names)} is registered for {view.mesh} "
            f"(is_expert_parallel={is_expert_parallel}); registered: {registered}"
            f"{self._tp_hint(names)}"
        )

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Return the group of all data-parallel ranks.

        No communication.

        Args:
            is_expert_parallel: Return that of the experts.

        Returns:
            The hybrid group of a hybrid index, else the group of ``dp_shard_dim``.

        Raises:
            ValueError: There is no expert mesh.
        """
        view = self._view(is_expert_parallel)
        if self.use_hybrid_fsdp and view.hybrid_group is not None:
            return view.hybrid_group
        return view.shard_group

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """Return the group that parameters are sharded over, that of ``dp_shard_dim``.

        No communication.

        Args:
            is_expert_parallel: Return that of the experts.
            independent_all_gather: Return the second group with these ranks where one was given.

        Returns:
            The group.

        Raises:
            ValueError: There is no expert mesh.
        """
        view = self._view(is_expert_parallel)
        if independent_all_gather and view.gather_group is not None:
            return view.gather_group
        return view.shard_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the group of ``dp_outer_dim``.

        No communication.

        Args:
            is_expert_parallel: Return that of the experts.

        Returns:
            The group; None when the index is not hybrid. Collectives of torch.distributed take
            None to mean the world group.

        Raises:
            ValueError: There is no expert mesh, or it lacks the outer dimension.
        """
        view = self._view(is_expert_parallel)
        if self.use_hybrid_fsdp and view.outer_group is None:
            raise ValueError(
                f"expt_device_mesh {view.mesh} has no dimension {self.dp_outer_dim!r}, so that "
                "experts have no outer group; use get_dp_group(is_expert_parallel=True)"
            )
        return view.outer_group

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the mesh that the index was given, which need not be torch's root mesh.

        No communication.

        Args:
            is_expert_parallel: Return that of the experts.

        Returns:
            ``device_mesh`` or ``expt_device_mesh``.

        Raises:
            ValueError: There is no expert mesh.
        """
        return self._view(is_expert_parallel).mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return this rank's position among the shards when both data-parallel dimensions shard.

        Parameters are cut over ``dp_shard_dim`` first and every part once more over
        ``dp_outer_dim``, so that shards are numbered inner-major while the hybrid group is
        outer-major. With ``r`` the rank in that group, ``I`` the size of ``dp_shard_dim`` and ``O``
        that of ``dp_outer_dim`` the place is ``(r % I) * O + r // I``; with ``l`` the place, the
        rank is ``(l % O) * I + l // O``. No communication.

        Args:
            is_expert_parallel: Return that of the experts.

        Returns:
            A number below the size of the hybrid group, different on all its ranks.

        Raises:
            AssertionError: The index is not one with ``hsdp_outer_dp_shard``.
            ValueError: There is no expert mesh.
        """
        if not self.hsdp_outer_dp_shard:
            raise AssertionError(
                "there is no logical hybrid rank without full-shard hybrid FSDP: make the index "
                "with hsdp_outer_dp_shard=True"
            )
        group = self.get_dp_group(is_expert_parallel)
        inner = self.get_fsdp_group(is_expert_parallel).size()
        return group.rank() % inner * (group.size() // inner) + group.rank() // inner

    def _view(self, is_expert_parallel: bool) -> FSDPView:
        if not is_expert_parallel:
            return self._dense
        if self._expert is None:
            raise ValueError(
                "is_expert_parallel=True needs an expert mesh, which the index does not have: "
                "make it with expt_device_mesh"
            )
        return self._expert

    def _tp_hint(self, names: Sequence[str | None]) -> str:
        others = set(names) - {self.dp_shard_dim, self.dp_outer_dim or self.dp_shard_dim}
        if self.tp_dim is not None or (names and not others):
            return ""
        return "; tp_dim is None: pass tp_dim, a size-1 TP dim is enough"


@dataclass(frozen=True)
class FSDPView:
    """The submeshes, by dimension names, and the groups of one mesh; None where there is none."""

    mesh: DeviceMesh
    submeshes: dict[tuple[str, ...], DeviceMesh]
    shard_group: dist.ProcessGroup
    outer_group: dist.ProcessGroup | None
    hybrid_group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None

    @property
    def lacks_hybrid_group(self) -> bool:
        """Whether there are both data-parallel dimensions, but no group of both."""
        return self.outer_group is not None and self.hybrid_group is None


def may_create_group(expert_mesh: object, outer: str | None) -> bool:
    """Return whether a group of the expert mesh may have to be created, by the whole world."""
    # Ranks outside the mesh cannot flatten it, and would count their later groups differently.
    return (
        isinstance(expert_mesh, DeviceMesh)
        and outer in get_mesh_names(expert_mesh)
        and root_mesh(expert_mesh).size() == dist.get_world_size()
    )


def agreed_views(
    make: Callable[[], tuple[FSDPView, FSDPView | None]],
    arguments: Mapping[str, object],
    hybrid: tuple[str, str],
) -> tuple[FSDPView, FSDPView | None]:
    """Make the views, and the expert hybrid group where a rank lacks it; raise on all ranks alike.
    Collective on the world group: one all-reduce (MAX of 64 int64), and a creation if need be.
    """
    error, views = None, None
    try:
        views = make()
    except Exception as own_error:
        error = own_error
    is_lacking = views is not None and views[1] is not None and views[1].lacks_hybrid_group
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    all_alike = require_equal(arguments, error, world, is_lacking)
    dense, expert = cast("tuple[FSDPView, FSDPView]", views)
    if all_alike and not is_lacking:
        return dense, expert
    made = created_hybrid_group(expert.submeshes[hybrid])
    return dense, replace(expert, hybrid_group=expert.hybrid_group or made)


def dense_view(
    mesh: DeviceMesh, dims: FSDPDims, hybrid_group: GroupLike | None, gather_group: GroupLike | None
) -> FSDPView:
    """Slice the dense mesh and check the given groups against it; no communication."""
    submeshes = register_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    hybrid = member_of("hybrid_fsdp_group", hybrid_group)
    outer_group = None
    if dims.hybrid is not None:
        check_hybrid_group("hybrid_fsdp_group", hybrid, submeshes[dims.hybrid])
        outer_group = submeshes[dims.hybrid].get_group(0)
    second = member_of("fsdp_group_ag", gather_group)
    check_all_gather_group("fsdp_group_ag", second, shard_group)
    return FSDPView(mesh, submeshes, shard_group, outer_group, hybrid, second)


def expert_view(
    mesh: DeviceMesh,
    dense_dims: FSDPDims,
    dense: FSDPView,
    hybrid_group: GroupLike | None,
    gather_group: GroupLike | None,
) -> FSDPView:
    """Slice the expert mesh and check the given groups against it; no communication."""
    dims = expert_dims(mesh, dense_dims)
    submeshes = register_submeshes(mesh, dims)
    shard_group = submeshes[(dims.shard,)].get_group()
    second = member_of("expt_fsdp_group_ag", gather_group)
    check_all_gather_group("expt_fsdp_group_ag", second, shard_group)
    hybrid = member_of("hybrid_fsdp_expt_group", hybrid_group)
    outer_group = None
    if dims.hybrid is not None:
        outer_group = submeshes[dims.hybrid].get_group(0)
        ranks = submeshes[dims.hybrid].mesh.flatten().tolist()
        if hybrid is not None:
            check_hybrid_group("hybrid_fsdp_expt_group", hybrid, submeshes[dims.hybrid])
        elif dense.hybrid_group is not None and group_ranks(dense.hybrid_group) == ranks:
            hybrid = dense.hybrid_group
    elif dense_dims.hybrid is not None:
        check_rows_of_hybrid_group(hybrid, shard_group)
    return FSDPView(mesh, submeshes, shard_group, outer_group, hybrid, second)


@dataclass(frozen=True)
class FSDPDims:
    """The names of the dimensions that an index works with; None where there is none."""

    shard: str
    outer: str | None
    tp: str | None

    @property
    def hybrid(self) -> tuple[str, str] | None:
        """The two data-parallel dimensions, outer first, or None without an outer one."""
        return None if self.outer is None else (self.outer, self.shard)


def dense_dims(mesh: DeviceMesh, shard: str | None, outer: str | None, tp: str | None) -> FSDPDims:
    """Return the dimensions of the dense mesh, or raise ValueError for one that it lacks."""
    _check_mesh("device_mesh", mesh)
    if shard is None:
        raise ValueError(
            "dp_shard_dim is None; pass the dimension that parameters are sharded over, one of: "
            f"{_known(mesh)}"
        )
    given = {"dp_shard_dim": shard, "dp_outer_dim": outer, "tp_dim": tp}
    present = {argument: name for argument, name in given.items() if name is not None}
    for argument, name in present.items():
        _check_dim(argument, name, "device_mesh", mesh)
    if len(set(present.values())) != len(present):
        raise ValueError(f"one dimension is given twice: {present}")
    _check_this_rank("device_mesh", mesh)
    return FSDPDims(shard, outer, tp)


def expert_dims(mesh: DeviceMesh, dense: FSDPDims) -> FSDPDims:
    """Return those of the dense dimensions that the expert mesh has; it needs ``shard``."""
    _check_mesh("expt_device_mesh", mesh)
    _check_dim("dp_shard_dim", dense.shard, "expt_device_mesh", mesh)
    _check_this_rank("expt_device_mesh", mesh)
    names = get_mesh_names(mesh)
    return FSDPDims(
        dense.shard,
        dense.outer if dense.outer in names else None,
        dense.tp if dense.tp in names else None,
    )


def register_submeshes(mesh: DeviceMesh, dims: FSDPDims) -> dict[tuple[str, ...], DeviceMesh]:
    """Slice every submesh that an index hands out, by its dimension names."""
    wanted = (
        (dims.tp,),
        (dims.outer, dims.shard, dims.tp),
        (dims.shard, dims.tp),
        (dims.outer, dims.shard),
        (dims.shard,),
    )
    library = {}
    for candidates in wanted:
        names = tuple(name for name in candidates if name is not None)
        if len(names) == len(candidates):
            library[names] = _submesh(mesh, names)
    return library


def _submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    try:
        return resolve_submesh(mesh, names)
    except ValueError as error:
        raise ValueError(
            f"{error}; make a mesh that has each of these as a separate dimension, for example "
            f"by _unflatten of a 1-D mesh into {names}"
        ) from error


def _check_mesh(argument: str, mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{argument} must be a DeviceMesh, got {type(mesh).__name__}")
    reject_destroyed(mesh)


def _check_dim(argument: str, name: str, mesh_argument: str, mesh: DeviceMesh) -> None:
    if name in (mesh.mesh_dim_names or ()) or name in get_mesh_names(mesh):
        return
    raise ValueError(
        f"{argument} {name!r} is not a dimension of {mesh_argument} {mesh}, which has: "
        f"{_known(mesh)}; name one of these, or make a mesh that has it as a separate dimension "
        "(_unflatten)"
    )


def _known(mesh: DeviceMesh) -> str:
    return ", ".join(get_mesh_names(mesh)) or "no names (give mesh_dim_names when making the mesh)"


def _check_this_rank(argument: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the {argument} {mesh}; only its members can make "
            "an index"
        )


def member_of(argument: str, group: GroupLike | None) -> dist.ProcessGroup | None:
    """Return what was given for an argument as a process group that this rank is in."""
    try:
        return as_process_group(group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from None


def check_hybrid_group(argument: str, group: dist.ProcessGroup | None, hybrid: DeviceMesh) -> None:
    """Raise ValueError unless a group has the ranks of ``(outer, shard)``, in outer-major order."""
    outer, shard = hybrid.mesh_dim_names or ("", "")
    how = _HOW_TO_MAKE.format(outer=outer, shard=shard)
    if group is None:
        raise ValueError(f"dp_outer_dim {outer!r} needs {argument}, which is None: {how}")
    expected = hybrid.mesh.flatten().tolist()
    found = group_ranks(group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but ({outer}, {shard}) of the mesh has "
            f"{ranks_text(expected)} in outer-major order: {how}"
        )


def check_rows_of_hybrid_group(
    group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless the group of this rank's shards is a row of the expert hybrid group.
    That is all that can be checked where the expert mesh lacks the outer dimension.
    """
    if group is None:
        raise ValueError(
            "expt_device_mesh lacks dp_outer_dim, so that the ranks of both data-parallel "
            "dimensions are not known: pass hybrid_fsdp_expt_group"
        )
    found, row = group_ranks(group), group_ranks(shard_group)
    start = group.rank() // len(row) * len(row)
    if len(found) % len(row) or found[start : start + len(row)] != row:
        raise ValueError(
            f"hybrid_fsdp_expt_group has {ranks_text(found)}, but in outer-major order the "
            f"{len(row)} from place {start} on must be those of dp_shard_dim in expt_device_mesh: "
            f"{ranks_text(row)}"
        )


def check_all_gather_group(
    argument: str, group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup
) -> None:
    """Raise ValueError unless a group, where given, has the ranks of the shards' group in order."""
    if group is None:
        return
    found, expected = group_ranks(group), group_ranks(shard_group)
    if found != expected:
        raise ValueError(
            f"{argument} has {ranks_text(found)}, but dp_shard_dim has "
            f"{ranks_text(expected)}: pass a second group of the same ranks, or None"
        )


def created_hybrid_group(hybrid: DeviceMesh) -> dist.ProcessGroup:
    """Return a new group over ``(outer, shard)`` of the expert mesh, the same at every call.
    Collective on the world group the first time.
    """
    ranks = hybrid.mesh.flatten().tolist()
    flat = flatten_mesh(hybrid, "_".join(("expert", *(hybrid.mesh_dim_names or ()))))
    if flat is None or group_ranks(flat.get_group()) != ranks:
        raise ValueError(
            f"cannot make a group of {ranks_text(ranks)} of {hybrid}: pass hybrid_fsdp_expt_group"
        )
    return flat.get_group()
