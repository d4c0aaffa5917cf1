"""The index of the submeshes and groups of fully sharded data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import GroupLike
from mcore.parallel.mesh_groups import (
    MeshGroups,
    agree_on_groups,
    is_from_world_mesh,
    resolve_dense_groups,
    resolve_expert_groups,
)
from mcore.parallel.torch_compat import is_distributed


class FSDPDistributedIndex:
    """Holds every submesh and process group of fully sharded data parallelism (FSDP).

    Parameters are sharded over the dimension ``dp_shard_dim``. With ``dp_outer_dim`` the index is
    hybrid: an outer dimension replicates the shards (HSDP), or shards them once more with
    ``hsdp_outer_dp_shard``. Pass its submeshes to ``torch.distributed.fsdp.fully_shard``: the
    submesh of ``dp_shard_dim`` shards, that of ``(dp_outer_dim, dp_shard_dim)`` replicates and
    shards.

    Construction checks that names, meshes and groups belong together. A hybrid index over a mesh
    of the whole world, or over slices of such a mesh, is collective on the world group: all ranks
    pass the same arguments, which they compare (one all-reduce, MAX of 64 int64). If the expert
    mesh has both data-parallel dimensions, no ``hybrid_fsdp_expt_group`` is given and the dense
    hybrid group has other ranks, the group of both dimensions is made. Other indices do no
    communication.

    Args:
        device_mesh: The mesh of the dense parameters, with dimension names. May be sliced or
            unflattened, in any order of dimensions. Put ``tp_dim`` last if DTensors are sharded
            over both: torch 2.13 cannot reduce them over dimensions in another order.
        dp_shard_dim: The dimension that parameters are sharded over (data and context parallel),
            required. May name a flattened dimension inside the mesh.
        dp_outer_dim: The outer data-parallel dimension, or None.
        tp_dim: The tensor-parallel dimension, or None.
        hybrid_fsdp_group: The ranks of ``(dp_outer_dim, dp_shard_dim)`` in outer-major order, as a
            group or a 1-D mesh. Required with ``dp_outer_dim``.
        hsdp_outer_dp_shard: Shard over the outer dimension too: see
            :meth:`get_logical_hybrid_fsdp_rank`.
        expt_device_mesh: The mesh of the expert parameters, with ``dp_shard_dim`` and those other
            dimensions that exist for experts.
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

    Raises:
        ValueError: A dimension is missing or overlaps another, a group has other ranks than the
            mesh, or this rank is not in a mesh or group. The text names the argument. On all ranks
            of a collective construction also if the arguments differ or one rank has an error.
        TypeError: An argument is not a DeviceMesh or a group, or ``hsdp_outer_dp_shard`` is not a
            bool.
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
        *misplaced: object,
        hybrid_fsdp_expt_group: GroupLike | None = None,
        fsdp_group_ag: GroupLike | None = None,
        expt_fsdp_group_ag: GroupLike | None = None,
    ) -> None:
        if not is_distributed():
            raise RuntimeError(
                "FSDPDistributedIndex needs torch.distributed, which is not initialised: "
                "call torch.distributed.init_process_group and make a DeviceMesh first"
            )

        is_flag = isinstance(hsdp_outer_dp_shard, bool)
        if misplaced or not is_flag or isinstance(expt_device_mesh, bool):
            raise TypeError(
                f"hsdp_outer_dp_shard is a {type(hsdp_outer_dp_shard).__name__} and "
                f"expt_device_mesh a {type(expt_device_mesh).__name__}. In Megatron-FSDP the sixth "
                "position is hybrid_fsdp_expt_group. Pass it, hsdp_outer_dp_shard and "
                "expt_device_mesh by keyword"
            )
        is_collective = dp_outer_dim is not None and is_from_world_mesh(device_mesh)
        dims = {"dp_shard_dim": dp_shard_dim, "dp_outer_dim": dp_outer_dim, "tp_dim": tp_dim}

        def resolve() -> tuple[MeshGroups, MeshGroups | None]:
            dense = resolve_dense_groups(device_mesh, dims, hybrid_fsdp_group, fsdp_group_ag)
            if hsdp_outer_dp_shard and dp_outer_dim is None:
                raise ValueError("hsdp_outer_dp_shard needs dp_outer_dim, which is None: pass it")
            if expt_device_mesh is None:
                return dense, None
            groups = hybrid_fsdp_expt_group, expt_fsdp_group_ag
            can_create = is_collective and is_from_world_mesh(expt_device_mesh)
            expert = resolve_expert_groups(expt_device_mesh, dims, dense, *groups, can_create)
            return dense, expert

        if is_collective:
            arguments = {
                **dims,
                "hsdp_outer_dp_shard": hsdp_outer_dp_shard,
                "expt_device_mesh": "None" if expt_device_mesh is None else "given",
                "hybrid_fsdp_expt_group": "None" if hybrid_fsdp_expt_group is None else "given",
            }
            self._dense, self._expert = agree_on_groups(resolve, arguments)
        else:
            self._dense, self._expert = resolve()
        self.device_mesh, self.expt_device_mesh = device_mesh, expt_device_mesh
        self.dp_shard_dim = cast("str", dp_shard_dim)
        self.dp_outer_dim, self.tp_dim = dp_outer_dim, tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard

    @property
    def use_hybrid_fsdp(self) -> bool:
        """Whether there is a ``dp_outer_dim``."""
        return self.dp_outer_dim is not None

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """The group of ``dp_shard_dim``."""
        return self._dense.shard_group

    @property
    def outer_fsdp_group(self) -> dist.ProcessGroup | None:
        """The group of ``dp_outer_dim``, or None."""
        return self._dense.outer_group

    @property
    def hybrid_fsdp_group(self) -> dist.ProcessGroup | None:
        """As given."""
        return self._dense.hybrid_group

    @property
    def fsdp_group_ag(self) -> dist.ProcessGroup | None:
        """As given."""
        return self._dense.gather_group

    @property
    def expt_fsdp_group(self) -> dist.ProcessGroup | None:
        """The group of ``dp_shard_dim`` in the expert mesh, or None without an expert mesh."""
        return self._expert and self._expert.shard_group

    @property
    def expt_outer_fsdp_group(self) -> dist.ProcessGroup | None:
        """The group of ``dp_outer_dim`` in the expert mesh, or None."""
        return self._expert and self._expert.outer_group

    @property
    def hybrid_fsdp_expt_group(self) -> dist.ProcessGroup | None:
        """As given, or made."""
        return self._expert and self._expert.hybrid_group

    @property
    def expt_fsdp_group_ag(self) -> dist.ProcessGroup | None:
        """As given."""
        return self._expert and self._expert.gather_group

    @property
    def mesh_library(self) -> dict[tuple[str | bool, ...], DeviceMesh]:
        """The registered submeshes. A key is the dimension names and whether the submesh is of the
        expert mesh, such as ``("dp_shard", "tp", False)``.
        """
        both = (self._dense, self._expert)
        return {
            (*names, groups is self._expert): mesh
            for groups in both
            if groups is not None
            for names, mesh in groups.submeshes.items()
        }

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return a registered submesh.

        No communication.

        Args:
            mesh_dim_names: One or more names, in the order of registration: ``tp``,
                ``(outer, shard, tp)``, ``(shard, tp)``, ``(outer, shard)`` or ``shard``, with the
                names that were passed to the index.
            is_expert_parallel: Return a submesh of the expert mesh.

        Returns:
            The submesh, the same object at every call.

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
        groups = self._groups_of(is_expert_parallel)
        found = groups.submeshes.get(tuple(names))
        if found is not None:
            return found
        hint = ""
        others = set(names) - {self.dp_shard_dim, self.dp_outer_dim or self.dp_shard_dim}
        if self.tp_dim is None and (others or not names):
            hint = ". tp_dim is None: pass tp_dim, a size-1 TP dim is enough"
        registered = ", ".join(str(known) for known in groups.submeshes)
        raise ValueError(
            f"no submesh {tuple(names)} is registered for {groups.mesh} "
            f"(is_expert_parallel={is_expert_parallel}). Registered: {registered}{hint}"
        )

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """Return the group of all data-parallel ranks.

        No communication.

        Args:
            is_expert_parallel: Return the group of the experts.

        Returns:
            The hybrid group of a hybrid index, else the group of ``dp_shard_dim``.

        Raises:
            ValueError: There is no expert mesh.
        """
        groups = self._groups_of(is_expert_parallel)
        if self.use_hybrid_fsdp and groups.hybrid_group is not None:
            return groups.hybrid_group
        return groups.shard_group

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the group that parameters are sharded over, that of ``dp_shard_dim``.

        No communication.

        Args:
            is_expert_parallel: Return the group of the experts.
            independent_all_gather: Return the second group with these ranks.

        Returns:
            The group. None without an expert mesh or without a second group, as Megatron-FSDP
            expects. For collectives of torch.distributed None means the world group.
        """
        groups = self._expert if is_expert_parallel else self._dense
        if groups is None:
            return None
        return groups.gather_group if independent_all_gather else groups.shard_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the group of ``dp_outer_dim``.

        No communication.

        Args:
            is_expert_parallel: Return the group of the experts.

        Returns:
            The group, or None if the index is not hybrid. For collectives of torch.distributed
            None means the world group.

        Raises:
            ValueError: There is no expert mesh, or it lacks the outer dimension.
        """
        groups = self._groups_of(is_expert_parallel)
        if self.use_hybrid_fsdp and groups.outer_group is None:
            raise ValueError(
                f"expt_device_mesh {groups.mesh} has no dimension {self.dp_outer_dim!r}, so "
                "experts have no outer group: use get_dp_group(is_expert_parallel=True)"
            )
        return groups.outer_group

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the mesh that was passed to the index, which need not be torch's root mesh.

        No communication.

        Args:
            is_expert_parallel: Return the mesh of the experts.

        Returns:
            ``device_mesh`` or ``expt_device_mesh``.

        Raises:
            ValueError: There is no expert mesh.
        """
        return self._groups_of(is_expert_parallel).mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return this rank's position among the shards when both data-parallel dimensions shard.

        Parameters are cut over ``dp_shard_dim`` first and every part once more over
        ``dp_outer_dim``. Shards are thus numbered inner-major, and the hybrid group is outer-major.
        With ``r`` the rank in that group, ``I`` the size of ``dp_shard_dim`` and ``O`` the size of
        ``dp_outer_dim`` the position is ``l = (r % I) * O + r // I``. The inverse is
        ``r = (l % O) * I + l // O``. No communication.

        Args:
            is_expert_parallel: Return the position among the shards of the experts.

        Returns:
            A number below the size of the hybrid group, different on all its ranks.

        Raises:
            AssertionError: The index was made without ``hsdp_outer_dp_shard``.
            ValueError: There is no expert mesh.
        """
        if not self.hsdp_outer_dp_shard:
            raise AssertionError(
                "there is no logical hybrid rank without full-shard hybrid FSDP: make the index "
                "with hsdp_outer_dp_shard=True"
            )
        group = self.get_dp_group(is_expert_parallel)
        inner = self._groups_of(is_expert_parallel).shard_group.size()
        return group.rank() % inner * (group.size() // inner) + group.rank() // inner

    def _groups_of(self, is_expert_parallel: bool) -> MeshGroups:
        if not is_expert_parallel:
            return self._dense
        if self._expert is None:
            raise ValueError(
                "is_expert_parallel=True needs an expert mesh, which the index does not have: "
                "make it with expt_device_mesh"
            )
        return self._expert


def using_tensor_parallel(
    dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False
) -> bool:
    """Return whether the tensor-parallel dimension of an index has more than one rank.

    No communication.

    Args:
        dist_index: The index.
        is_expert_parallel: Look at the expert mesh.

    Returns:
        False also without the dimension or, for experts, without an expert mesh.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> using_tensor_parallel(FSDPDistributedIndex(mesh, "dp", tp_dim="tp"))
        False
        >>> dist.destroy_process_group()
    """
    mesh = dist_index.expt_device_mesh if is_expert_parallel else dist_index.device_mesh
    tp_dim = dist_index.tp_dim
    if mesh is None or tp_dim is None or tp_dim not in (mesh.mesh_dim_names or ()):
        return False
    return mesh[tp_dim].size() > 1
