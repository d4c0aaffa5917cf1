"""ProcessGroups: every group that a rank belongs to, in one explicit object."""

from __future__ import annotations

import atexit
import functools
import importlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import as_process_group, get_pg_rank, get_pg_size, group_ranks
from mcore.parallel.process_groups.creation import (
    NEEDS_INIT,
    GroupPlan,
    GroupSettings,
    LazyMesh,
    Uses,
    groups_from_sizes,
    plan_groups,
)
from mcore.parallel.process_groups.from_mesh import MeshPlan, groups_from_mesh, plan_mesh
from mcore.parallel.process_groups.layout import ParallelSizes, embedding_choices, wanted_fields
from mcore.parallel.torch_compat import has_destroyed_groups, is_destroyed, is_distributed


@dataclass
class _Owned:
    """The groups and meshes that a ProcessGroups created, and whether it was destroyed."""

    uses: Uses = field(default_factory=dict)
    lazy_meshes: dict[str, LazyMesh] = field(default_factory=dict)
    is_destroyed: bool = False


class _Owner:
    """The part of a ProcessGroups outside its fields."""

    __slots__ = ("__weakref__", "_owned")

    def _own(self, owned: _Owned) -> None:
        self._owned = owned


@dataclass(kw_only=True, slots=True, repr=False)
class ProcessGroups(_Owner):
    """The process groups of this rank. A field that is not set reads None.

    None means no parallelism of that kind: the size is 1 and the rank 0. An unknown name
    is an AttributeError, an unknown keyword a TypeError. The fields can be assigned.
    Making an object does no communication, but :meth:`from_sizes` and :meth:`from_mesh` do.
    For a parameter that is a group, functions also accept a ProcessGroups or a
    ProcessGroupCollection of megatron-core. They use the field that is the parameter's default.

    ``copy.deepcopy`` of an object that holds a ProcessGroups, such as a config, shares it. Pickling
    a ProcessGroups with groups is a TypeError, since another process cannot use them.

    Args:
        tp: Tensor parallel.
        pp: Pipeline parallel.
        mp: Model parallel: pipeline and tensor.
        embd: The ranks of this pipeline that hold the word embedding, on those ranks.
        pos_embd: The ranks of this pipeline that hold the position embedding, on those ranks.
        cp: Context parallel.
        tp_cp: Tensor and context parallel.
        ep: Expert parallel.
        expt_tp: Tensor parallel inside the experts.
        tp_ep: Expert and expert-tensor parallel.
        tp_ep_pp: Expert, expert-tensor and pipeline parallel.
        dp: Data parallel.
        dp_cp: Data and context parallel: the replicas of a dense parameter.
        tp_dp_cp: Tensor, data and context parallel.
        expt_dp: Data parallel for the experts.
        intra_dp_cp: Data and context parallel inside one instance of a distributed optimizer.
        intra_expt_dp: The same for the experts.
        inter_dist_opt: Across the instances of a distributed optimizer.
        hcp: Hierarchical context parallel, innermost level first.
        dense_mesh: The mesh of the dense layout.
        expert_mesh: The mesh of the expert layout.

    Example:
        >>> pgs = ProcessGroups()
        >>> pgs, pgs.tp, pgs.size("tp")
        (ProcessGroups(empty), None, 1)
    """

    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    mp: dist.ProcessGroup | None = None
    embd: dist.ProcessGroup | None = None
    pos_embd: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp_cp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    expt_tp: dist.ProcessGroup | None = None
    tp_ep: dist.ProcessGroup | None = None
    tp_ep_pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    tp_dp_cp: dist.ProcessGroup | None = None
    expt_dp: dist.ProcessGroup | None = None
    intra_dp_cp: dist.ProcessGroup | None = None
    intra_expt_dp: dist.ProcessGroup | None = None
    inter_dist_opt: dist.ProcessGroup | None = None
    hcp: list[dist.ProcessGroup] | None = None
    dense_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        self._own(_Owned())
        _drop_at_exit()
        _living[id(self)] = self

    @classmethod
    def from_sizes(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        expt_tp: int | None = None,
        device_type: str | None = None,
        order: str = "tp-cp-ep-dp-pp",
        groups: Collection[str] | None = None,
        embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
        position_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
        hcp_sizes: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Mapping[str, Any] | None = None,
    ) -> ProcessGroups:
        """Create every group of this rank from the sizes of the parallelisms.

        Collective on the world group: every rank calls it with the same arguments, which one
        all-reduce (MAX of 64 int64) checks before all groups are made, in one fixed order.
        Data parallelism uses the remaining ranks: ``dp = world / (tp * cp * pp)`` and
        ``expt_dp = world / (expt_tp * ep * pp)``. Fields with the same ranks share one group, in
        one object and across calls. A field of all ranks is the world group. :meth:`destroy`
        releases the groups.

        Args:
            tp: Tensor-parallel size.
            cp: Context-parallel size, only for dense layers.
            pp: Pipeline-parallel size.
            ep: Expert-parallel size, only for experts.
            expt_tp: Tensor-parallel size inside the experts. None means ``tp``.
            device_type: The device type of ``dense_mesh`` and ``expert_mesh``. None means the
                accelerator if the world group's backend is made for it, else ``"cpu"``.
            order: The axes from fastest to slowest. In the default, the ranks of a
                tensor-parallel group are adjacent and the ranks of a pipeline far apart.
            groups: The names of the fields to create. None means all. A mesh is made if the groups
                of all its dimensions are.
            embedding_ranks: Chooses the ranks of ``embd`` among the ranks of a pipeline, ordered
                by stage. None means the first and the last.
            position_embedding_ranks: The same for ``pos_embd``. None means the first.
            hcp_sizes: Factors of ``cp``, the fastest first. Makes ``hcp``, with one group each.
            timeout: Timeout of the groups' collectives. None means that of ``init_process_group``.
            backend: Backend of the groups, such as ``"gloo"``. None means the world group's.
            pg_options: The backend's options for a field, such as ``{"tp": options}``. Such a
                field shares its group with no other.

        Returns:
            The groups of this rank. ``inter_dist_opt`` stays None, as there is one optimizer
            instance. Without torch.distributed, and all sizes 1, every field is None.

        Raises:
            ValueError: A size is below 1, the world cannot be divided, ``order`` is malformed,
                ``groups`` or ``pg_options`` has an unknown name, the product of the factors is not
                ``cp``, or the ranks were given different arguments. On every rank.
            RuntimeError: torch.distributed is not initialised and a size is above 1.

        Example:
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> pgs = ProcessGroups.from_sizes(tp=1, groups=("tp", "dp"))
            >>> pgs
            ProcessGroups(tp=1, dp=1)
            >>> dist.destroy_process_group()
        """

        def plan() -> tuple[GroupPlan, GroupSettings]:
            sizes = ParallelSizes(tp, cp, pp, ep, tp if expt_tp is None else expt_tp)
            choices = embedding_choices(embedding_ranks, position_embedding_ranks)
            planned = plan_groups(sizes, groups, order, choices, hcp_sizes, device_type)
            return planned, GroupSettings(timeout, backend, pg_options or {})

        if not is_distributed():
            plan()
            return cls()
        return cls._build(*groups_from_sizes(plan))

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None = None,
        *,
        names: Mapping[str, str | Sequence[str]] | None = None,
        groups: Collection[str] | None = None,
        embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
        position_embedding_ranks: Callable[[list[int]], Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Mapping[str, Any] | None = None,
    ) -> ProcessGroups:
        """Use the groups of named device meshes and create composites of their dimensions.

        Collective on the world group: every rank calls it with the same arguments, which one
        all-reduce (MAX of 64 int64) checks first. A field is the group of the dimension of the
        same name, also of a flattened dimension: ``tp``, ``cp``, ``dp`` and ``pp`` of ``mesh``,
        ``ep``, ``expt_dp`` and ``expt_tp`` of ``expert_mesh``, or of ``mesh`` without the latter.
        The meshes of torchtitan, Accelerate and Lightning need no names. Without a dimension
        ``dp``, it consists of ``dp_replicate`` and ``dp_shard`` (or ``fsdp``), or is ``batch`` or
        ``data_parallel``. Likewise ``tp`` is ``tensor_parallel``, ``expt_dp`` consists of
        ``dp_replicate`` and ``efsdp``, and ``expt_tp`` is ``etp``. In a single mesh with ``ep`` the
        other groups of the experts consist of the remaining dimensions.
        A parallelism without a dimension has size 1, and its field stays None. Composites are
        flattened in the mesh under the field's name if torch can, and stay with the mesh. Fields
        with the same ranks share one group.

        Args:
            mesh: The dense mesh, with dimension names.
            expert_mesh: The expert mesh, with dimension names and the same pipelines.
            names: The dimension or dimensions of a field, also flattened dimensions:
                ``{"dp": ("dp_replicate", "dp_shard")}``. Composites may be named too, and ``hcp``,
                whose dimensions are its levels, innermost first.
            groups: The names of the fields to fill. None means all that the meshes provide.
            embedding_ranks: As in :meth:`from_sizes`.
            position_embedding_ranks: As in :meth:`from_sizes`.
            timeout: Timeout of created groups. None means that of ``init_process_group``.
            backend: Backend of created groups. None means the world group's.
            pg_options: As in :meth:`from_sizes`.

        Returns:
            The groups of this rank, with ``dense_mesh`` and ``expert_mesh`` as given. ``hcp`` is
            None unless ``names`` has it.

        Raises:
            TypeError: A mesh is not a DeviceMesh.
            ValueError: A mesh has no dimension names, is of a destroyed world, or has a dimension
                of several ranks that belongs to no parallelism. A name is unknown, a dimension has
                two names, or the meshes have different pipelines. A mesh covers a part of the world
                and a new group would be needed. The ranks were given different arguments (on every
                rank). Or, after all groups are made, this rank is in no mesh.
            RuntimeError: torch.distributed is not initialised.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> ProcessGroups.from_mesh(mesh, groups=("tp", "dp"))
            ProcessGroups(tp=1, dp=1, dense_mesh=(1, 1))
            >>> dist.destroy_process_group()
        """

        def plan() -> tuple[MeshPlan, GroupSettings]:
            wanted = wanted_fields(groups)
            choices = embedding_choices(embedding_ranks, position_embedding_ranks)
            planned = plan_mesh(mesh, expert_mesh, names or {}, wanted, groups is not None, choices)
            return planned, GroupSettings(timeout, backend, pg_options or {})

        if not is_distributed():
            raise RuntimeError(f"from_mesh {NEEDS_INIT}")
        return cls._build(*groups_from_mesh(plan))

    @classmethod
    def from_megatron(cls, collection: Any = None) -> ProcessGroups:
        """Use the groups that Megatron-LM made.

        No communication. The groups stay Megatron-LM's: :meth:`destroy` leaves them.

        Args:
            collection: A ``ProcessGroupCollection`` of megatron-core. None means the groups of
                ``megatron.core.parallel_state``, after ``initialize_model_parallel``.

        Returns:
            The groups of this rank, with Megatron-LM's names. A group that is not set there, or
            that this rank does not belong to, is None.

        Raises:
            RuntimeError: There is no collection, and megatron-core is absent or not initialised.
            TypeError: ``collection`` has no field of a ProcessGroups.

        Example:
            >>> from types import SimpleNamespace
            >>> ProcessGroups.from_megatron(SimpleNamespace(tp=None, dp=None))
            ProcessGroups(empty)
        """
        if collection is None:
            kind, state = _import_megatron("process_groups_config", "parallel_state")
            if not state.is_initialized():
                raise RuntimeError(
                    "Megatron-LM has no groups yet. Call "
                    "megatron.core.parallel_state.initialize_model_parallel(...) before"
                )
            collection = kind.ProcessGroupCollection.use_mpu_process_groups()
        absent = object()
        found: dict[str, Any] = {
            name: getattr(collection, name, absent) for name in _MEGATRON_NAMES
        }
        if all(value is absent for value in found.values()):
            raise TypeError(
                f"expected a ProcessGroupCollection of megatron-core, got {type(collection)}"
            )
        unset: tuple[object, ...] = (absent, dist.GroupMember.NON_GROUP_MEMBER, [])
        return cls(**{name: value for name, value in found.items() if value not in unset})

    def to_megatron(self) -> Any:
        """Return a ``ProcessGroupCollection`` of megatron-core with these groups.

        No communication. A field that is not set is None there. ``intra_dist_opt`` is the world
        group, since there is one optimizer instance, unless ``inter_dist_opt`` is set.

        Raises:
            RuntimeError: megatron-core is not installed, or these groups were destroyed.

        Example:
            >>> ProcessGroups().to_megatron()  # doctest: +SKIP
            ProcessGroupCollection(...)
        """
        (module,) = _import_megatron("process_groups_config")
        kind = module.ProcessGroupCollection
        theirs = {each.name for each in fields(kind)}
        values = {name: getattr(self, name) for name in _MEGATRON_NAMES if name in theirs}
        if "intra_dist_opt" in theirs and is_distributed() and self.inter_dist_opt is None:
            values["intra_dist_opt"] = dist.group.WORLD
        return kind(**values)

    @classmethod
    def _build(cls, made: Mapping[str, Any], uses: Uses) -> ProcessGroups:
        """Return an object with these fields. Meshes are made when they are first read."""
        lazy = {name: value for name, value in made.items() if isinstance(value, LazyMesh)}
        pgs = cls(**{name: value for name, value in made.items() if name not in lazy})
        pgs._own(_Owned(uses, lazy))
        for name in lazy:
            delattr(pgs, name)  # an unset slot makes Python call __getattr__
        return pgs

    def destroy(self) -> None:
        """Release the groups. Groups that :meth:`from_sizes` or :meth:`from_mesh` created, and that
        no other ProcessGroups shares, are destroyed, with their threads and file descriptors.

        Every rank calls it, in the same order as other collectives, while no collective is
        running. The world group, the groups of given meshes and assigned groups stay. Reading a
        field is a RuntimeError from then on. A second call does nothing.

        Example:
            >>> pgs = ProcessGroups.from_sizes()
            >>> pgs.destroy()
            >>> pgs
            ProcessGroups(destroyed)
        """
        uses = self._owned.uses
        self._drop()
        for groups, keys in uses.items():
            groups.release(keys)

    def _drop(self) -> None:
        self._own(_Owned(is_destroyed=True))
        for name in _FIELD_NAMES:
            with suppress(AttributeError):  # a mesh that was not made, or a second call
                delattr(self, name)

    def _peek(self, name: str) -> Any:
        """Return a field without making its mesh, and without an error."""
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            return self._owned.lazy_meshes.get(name)

    def __getattr__(self, name: str) -> Any:
        """Make a mesh at its first use. Python calls this only for attributes that are not set."""
        if name not in _FIELD_NAMES:
            raise AttributeError(
                f"ProcessGroups has no field {name!r}. Its fields are {', '.join(_FIELD_NAMES)}"
            )
        if self._owned.is_destroyed:
            raise RuntimeError(
                f"cannot read {name}: these ProcessGroups were destroyed. Make new ones, for "
                "example with ProcessGroups.from_sizes(...)"
            )
        mesh = self._owned.lazy_meshes[name].make()
        setattr(self, name, mesh)
        return mesh

    def __copy__(self) -> ProcessGroups:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroups:
        return self

    def __reduce__(self) -> tuple[type[ProcessGroups], tuple[()]]:
        if not self._owned.is_destroyed and all(self._peek(name) is None for name in _FIELD_NAMES):
            return ProcessGroups, ()
        raise TypeError(
            f"cannot pickle {self!r}: process groups belong to this process. Leave them out and "
            "make new groups in the other process, for example with ProcessGroups.from_sizes(...)"
        )

    def size(self, name: str) -> int:
        """Return the number of ranks in the group of field ``name``, 1 if it is not set.

        Raises:
            AttributeError: There is no such field.
            TypeError: The field is not one group (``hcp``, a mesh).

        Example:
            >>> ProcessGroups().size("dp_cp")
            1
        """
        return get_pg_size(self._group(name))

    def rank(self, name: str) -> int:
        """Return this rank's rank in the group of field ``name``, 0 if it is not set.

        Raises:
            AttributeError: There is no such field.
            TypeError: The field is not one group (``hcp``, a mesh).

        Example:
            >>> ProcessGroups().rank("dp_cp")
            0
        """
        return get_pg_rank(self._group(name))

    def ranks(self, name: str) -> list[int]:
        """List the global ranks in the group of field ``name`` in the group's order.

        If the field is not set, this rank alone.

        Raises:
            AttributeError: There is no such field.
            TypeError: The field is not one group (``hcp``, a mesh).

        Example:
            >>> ProcessGroups().ranks("dp_cp")
            [0]
        """
        member = as_process_group(self._group(name))
        if member is None:
            return [dist.get_rank() if is_distributed() else 0]
        return group_ranks(member)

    def _group(self, name: str) -> dist.ProcessGroup | None:
        value = getattr(self, name) if name in _FIELD_NAMES else self.__getattr__(name)
        if name in ("hcp", "dense_mesh", "expert_mesh") and value is not None:
            raise TypeError(f"the field {name} is not one process group but {_format(value)}")
        return cast("dist.ProcessGroup | None", value)

    def __repr__(self) -> str:
        if self._owned.is_destroyed:
            return "ProcessGroups(destroyed)"
        values = ((name, self._peek(name)) for name in _FIELD_NAMES)
        parts = [f"{name}={_format(value)}" for name, value in values if value is not None]
        return f"ProcessGroups({', '.join(parts) or 'empty'})"


ProcessGroupCollection = ProcessGroups
_FIELD_NAMES = tuple(each.name for each in fields(ProcessGroups))
_MEGATRON_NAMES = tuple(name for name in _FIELD_NAMES if not name.endswith("_mesh"))
_living: weakref.WeakValueDictionary[int, ProcessGroups] = weakref.WeakValueDictionary()


def _import_megatron(*names: str) -> list[Any]:
    """Import modules of ``megatron.core``."""
    try:
        return [importlib.import_module(f"megatron.core.{name}") for name in names]
    except ImportError as error:
        raise RuntimeError(
            f"the groups of Megatron-LM need megatron-core: {error}. Run pip install megatron-core"
        ) from error


def _drop_destroyed() -> None:
    # The threads of a group that outlives its world abort the interpreter's exit.
    for pgs in list(_living.values()):
        held = [*(pgs._peek(name) for name in _FIELD_NAMES), *(pgs._peek("hcp") or ())]
        if any(
            has_destroyed_groups(group) if isinstance(group, DeviceMesh) else is_destroyed(group)
            for group in held
        ):
            pgs._drop()


# Registers the release of references to destroyed groups, once.
_drop_at_exit = functools.cache(functools.partial(atexit.register, _drop_destroyed))


def _format(value: object) -> object:
    """Return a size, a list of sizes or the shape of a mesh. Never raise."""
    if isinstance(value, list | tuple):
        return [_format(item) for item in value]
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    size = getattr(value, "size", None)
    return size() if callable(size) else value
