"""Groups made once for each set of ranks, shared, and destroyed with their last user.

:class:`GroupMaker` makes them, :func:`plan_groups` computes their ranks from the sizes of the
parallelisms, and :func:`groups_from_sizes` makes all of them in one order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import require_equal
from mcore.parallel.groups import reject_destroyed, world_size
from mcore.parallel.process_groups.layout import (
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    FIELD_AXES,
    GROUP_FIELDS,
    Choose,
    Layout,
    ParallelSizes,
    embedding_lists,
    hierarchical_lists,
    layouts_of_sizes,
    wanted_fields,
)
from mcore.parallel.torch_compat import (
    can_count_groups,
    count_group,
    is_destroyed,
    is_distributed,
    job_timeout,
)
from mcore.tensor.device import available_accelerator

Ranks = tuple[int, ...]
Plan = TypeVar("Plan")
_Key = tuple[Ranks, str, str]  # ranks, backend, timeout

NEEDS_INIT = (
    "needs torch.distributed, which is not initialised: "
    "call torch.distributed.init_process_group first"
)


@dataclass(frozen=True)
class GroupSettings:
    """Timeout, backend and backend options of new groups."""

    timeout: timedelta | None = None
    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # by field

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta or None, got {self.timeout!r}")
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {self.timeout}")
        # new_group also refuses a backend, but only on members: then the ranks count later groups
        # differently.
        for pair in () if self.backend is None else self.backend.split(","):
            name = pair.rpartition(":")[2]
            if not dist.is_backend_available(name):
                raise ValueError(
                    f"no backend {name!r} (backend={self.backend!r}): torch has "
                    f"{', '.join(filter(dist.is_backend_available, dist.Backend.backend_list))} "
                    "here"
                )
        for name in self.options:
            if name not in GROUP_FIELDS:
                raise ValueError(
                    f"pg_options has {name!r}, which is no group. Known: {', '.join(GROUP_FIELDS)}"
                )

    def facts(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        options = {name: type(value).__name__ for name, value in sorted(self.options.items())}
        return {"timeout": self.timeout, "backend": self.backend, "pg_options": options}


class SharedGroup:
    """One group, if this rank is in it, and the number of ProcessGroups that use it."""

    # A weak reference: torch keeps a group until it is destroyed. A longer reference would keep
    # its threads, which abort the interpreter's exit.

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self.users = 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, or None if this rank is in none or it no longer exists."""
        return None if self._group is None else self._group()

    @property
    def is_usable(self) -> bool:
        """Whether the group still exists. Always True on ranks outside, which cannot check."""
        return self._group is None or not (self.group is None or is_destroyed(self.group))

    def release(self) -> None:
        """End one use, and destroy the group after the last use."""
        self.users -= 1
        group = self.group
        if self.users == 0 and group is not None and not is_destroyed(group):
            dist.destroy_process_group(group)


# The groups made in each world. Every rank records every group, also those it is not a member of.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, SharedGroup]] = (
    weakref.WeakKeyDictionary()
)


def _list_shareable() -> dict[_Key, SharedGroup]:
    """Return the groups of this world that can be shared, and drop destroyed groups."""
    made = _made.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), {})
    for key in [key for key, shared in made.items() if shared.users < 1 or not shared.is_usable]:
        del made[key]
    return made


def agree_on_plan(
    make_plan: Callable[[], Plan], facts: Callable[[Plan], Mapping[str, object]]
) -> Plan:
    """Make this rank's plan, or raise on all ranks if one rank cannot or if the facts differ.
    Collective on the world group: one all-reduce (MAX of 64 int64). None in a world of one rank.
    """
    if dist.get_world_size() == 1:
        return make_plan()
    error, plan = None, None
    own: Mapping[str, object] = {}
    try:
        plan = make_plan()
        own = facts(plan)
    except Exception as own_error:
        error = own_error
    made = _list_shareable()
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    if not require_equal(own, error, world, sorted(made) if made else ""):
        made.clear()  # some ranks have destroyed groups that others still have: share none
    return cast("Plan", plan)


class GroupMaker:
    """Creates one group for each set of ranks. All ranks make the same calls in the same order."""

    # On an accelerator every communicator costs memory and start-up time, and many parallelisms of
    # size 1 or of full size have the same ranks.

    def __init__(self, settings: GroupSettings, *, share: bool = True) -> None:
        self.used: dict[int, SharedGroup] = {}
        self._settings = settings
        self._rank = dist.get_rank()
        # A rank is in few of the groups, and new_group takes 10 us for each of the others.
        self._counts_others = can_count_groups()
        self.timeout = settings.timeout or job_timeout()
        self._key_end = settings.backend or "", str(self.timeout)
        self._shared = _list_shareable() if share else {}
        self._own: dict[tuple[Ranks, int], dist.ProcessGroup | None] = {}
        if self.timeout == job_timeout() and settings.backend in (None, dist.get_backend()):
            self.adopt([range(dist.get_world_size())], dist.group.WORLD)

    def adopt(self, rank_lists: Iterable[Sequence[int]], group: dist.ProcessGroup | None) -> None:
        """Record existing groups. ``group`` is this rank's group, if it is in any of the lists."""
        for ranks in rank_lists:
            self._own.setdefault((tuple(ranks), 0), group if self._rank in ranks else None)

    def knows(self, rank_lists: Iterable[Sequence[int]], name: str) -> bool:
        """Return whether every list has a group."""
        options = self._identify_options(name)
        return all(
            (ranks, options) in self._own or (not options and self._make_key(ranks) in self._shared)
            for ranks in map(tuple, rank_lists)
        )

    def group_of(self, rank_lists: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
        """Return this rank's group among disjoint lists, and create all missing groups."""
        options_id = self._identify_options(name)
        mine = None
        for ranks in map(tuple, rank_lists):
            if (ranks, options_id) not in self._own:
                key = self._make_key(ranks)
                shared = None if options_id else self._shared.get(key)
                if shared is None:
                    shared = SharedGroup(self._make_group(ranks, name))
                    if not options_id:
                        self._shared[key] = shared
                if id(shared) not in self.used:
                    self.used[id(shared)] = shared
                    shared.users += 1
                self._own[ranks, options_id] = shared.group
            if self._rank in ranks:
                mine = self._own[ranks, options_id]
        return mine

    def _make_group(self, ranks: Ranks, name: str) -> dist.ProcessGroup | None:
        if self._counts_others and self._rank not in ranks:
            count_group()
            return None
        made = dist.new_group(
            list(ranks),
            timeout=self.timeout,
            backend=self._settings.backend,
            pg_options=self._settings.options.get(name),
            group_desc=f"mcore_{name}",
        )
        return made if self._rank in ranks else None

    def _make_key(self, ranks: Ranks) -> _Key:
        return ranks, *self._key_end

    def _identify_options(self, name: str) -> int:
        return id(self._settings.options[name]) if name in self._settings.options else 0


@dataclass(frozen=True)
class GroupPlan:
    """The ranks of every group, computed equally on every rank before any group is made."""

    dense: Layout
    expert: Layout
    table: dict[str, list[list[int]]]
    hcp_levels: list[list[list[int]]]
    device_type: str
    facts: dict[str, object]  # the arguments, equal on all ranks


def plan_groups(
    sizes: ParallelSizes,
    groups: Collection[str] | None,
    order: str,
    choices: Mapping[str, Choose],
    hcp_sizes: Sequence[int] | None,
    device_type: str | None,
) -> GroupPlan:
    """Compute the ranks of the wanted groups and check the arguments. No communication."""
    wanted = wanted_fields(groups)
    if hcp_sizes is None and groups is not None and "hcp" in groups:
        raise ValueError("groups names hcp, which needs hcp_sizes=(...)")
    given = [f"{name}={value}" for name, value in vars(sizes).items() if value > 1]
    if given and not is_distributed():
        raise RuntimeError(f"{', '.join(given)} {NEEDS_INIT}")
    dense, expert = layouts_of_sizes(sizes, world_size(), order)
    hcp_levels = [] if hcp_sizes is None else hierarchical_lists(dense.lists(["cp"]), hcp_sizes)
    lists: dict[tuple[str, ...], list[list[int]]] = {}  # by axes, which several fields share
    table = {}
    for name in wanted:
        if name == "hcp":
            continue
        axes = FIELD_AXES[name]
        if axes not in lists:
            lists[axes] = (expert if name in EXPERT_FIELDS else dense).lists(axes)
        table[name] = lists[axes]
        if name in EMBEDDING_FIELDS:
            table[name] = embedding_lists(lists[axes], choices[name], name)
    kind = device_type or default_device_type()
    facts = {
        **vars(sizes),
        "order": order,
        "groups": ", ".join(wanted),
        "hcp_sizes": hcp_sizes and list(hcp_sizes),
        "device_type": kind,
        "embedding_ranks": table.get("embd"),
        "position_embedding_ranks": table.get("pos_embd"),
    }
    levels = hcp_levels if "hcp" in wanted else []
    return GroupPlan(dense, expert, table, levels, kind, facts)


def groups_from_sizes(
    make_plan: Callable[[], tuple[GroupPlan, GroupSettings]],
) -> tuple[dict[str, Any], list[SharedGroup]]:
    """Make this rank's plan and its groups, or raise on all ranks if one rank cannot.
    Collective on the world group: one all-reduce (MAX of 64 int64), then creation in one order.
    """
    plan, settings = agree_on_plan(make_plan, lambda made: {**made[0].facts, **made[1].facts()})
    maker = GroupMaker(settings)
    made: dict[str, Any] = {name: maker.group_of(lists, name) for name, lists in plan.table.items()}
    if plan.hcp_levels:
        made["hcp"] = [maker.group_of(lists, "hcp") for lists in plan.hcp_levels]
    for name, layout in (("dense_mesh", plan.dense), ("expert_mesh", plan.expert)):
        if all(axis in made for axis in layout.axes):
            groups = [made[axis] for axis in layout.axes]
            made[name] = LazyMesh(layout, groups, plan.device_type)
    return made, list(maker.used.values())


@dataclass(frozen=True)
class LazyMesh:
    """A mesh of existing groups, made on demand since it takes as long as making the groups."""

    layout: Layout
    groups: list[dist.ProcessGroup]
    device_type: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return tuple(self.layout.ranks.shape)

    def make(self) -> DeviceMesh:
        """Return a new mesh of these groups. No communication."""
        for group in self.groups:
            reject_destroyed(group)
        axes = self.layout.axes
        return DeviceMesh.from_group(
            self.groups, self.device_type, mesh=self.layout.ranks, mesh_dim_names=axes
        )


def default_device_type() -> str:
    """Return the accelerator's type if the world group's backend is made for it, else ``"cpu"``."""
    accelerator = available_accelerator()
    if accelerator is None or not is_distributed():
        return "cpu"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backend = {kind: name for kind, _, name in pairs}.get(accelerator.type, "gloo")
    return "cpu" if backend == "gloo" else accelerator.type
