"""The index itself, as programs use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.fsdp_index.dimensions import dense_dims
from mcore.parallel.fsdp_index.view import (
    FSDPView,
    agreed_views,
    covers_world,
    dense_view,
    expert_view,
)
from mcore.parallel.groups import GroupLike
from mcore.parallel.torch_compat import is_distributed


class FSDPDistributedIndex:
    """Holds every submesh and process group of fully sharded data parallelism (FSDP).

    Parameters are sharded over the dimension ``dp_shard_dim``. With ``dp_outer_dim`` the index is
    hybrid: an outer dimension replicates the shards (HSDP), or shards them once more with
    ``hsdp_outer_dp_shard``. A submesh serves ``torch.distributed.fsdp.fully_shard`` as it is: that
    of ``dp_shard_dim`` shards, that of ``(dp_outer_dim, dp_shard_dim)`` replicates and shards.

    Construction checks that names, meshes and groups belong together. A hybrid index over a mesh
    of the whole world, or over slices of one, is collective on the world group: all ranks pass the
    same arguments, which they compare (one all-reduce, MAX of 64 int64). Where its expert mesh has
    both data-parallel dimensions, the group of both is made if no ``hybrid_fsdp_expt_group`` is
    given and the dense one has other ranks. Other indices do no communication.

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
            the mesh, or this rank is not in a mesh or group; the text names the argument. Where the
            ranks compare: their arguments differ, or another rank has an error, on all ranks.
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

        is_collective = dp_outer_dim is not None and covers_world(device_mesh)

        def views() -> tuple[FSDPView, FSDPView | None]:
            dims = dense_dims(device_mesh, dp_shard_dim, dp_outer_dim, tp_dim)
            if hsdp_outer_dp_shard and dp_outer_dim is None:
                raise ValueError("hsdp_outer_dp_shard needs dp_outer_dim, which is None: pass it")
            dense = dense_view(device_mesh, dims, hybrid_fsdp_group, fsdp_group_ag)
            if expt_device_mesh is None:
                return dense, None
            groups = hybrid_fsdp_expt_group, expt_fsdp_group_ag
            can_create = is_collective and covers_world(expt_device_mesh)
            return dense, expert_view(expt_device_mesh, dims, dense, *groups, can_create)

        if is_collective:
            arguments = {
                "dp_shard_dim": dp_shard_dim,
                "dp_outer_dim": dp_outer_dim,
                "tp_dim": tp_dim,
                "hsdp_outer_dp_shard": hsdp_outer_dp_shard,
                "expt_device_mesh": "None" if expt_device_mesh is None else "given",
                "hybrid_fsdp_expt_group": "None" if hybrid_fsdp_expt_group is None else "given",
            }
            hybrid = cast("tuple[str, str]", (dp_outer_dim, dp_shard_dim))
            dense, expert = agreed_views(views, arguments, hybrid)
        else:
            dense, expert = views()
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
