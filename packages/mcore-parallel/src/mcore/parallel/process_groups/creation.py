"""Groups made once for each set of ranks, shared, and destroyed with their last user.

:class:`GroupMaker` makes them, :func:`plan_groups` computes their ranks from the sizes of the
parallelisms, and :func:`groups_from_sizes` makes all of them in one order.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
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
    RankLists,
    embedding_lists,
    hierarchical_lists,
    layouts_of_sizes,
    wanted_fields,
)
from mcore.parallel.tensor_memory import bytes_of
from mcore.parallel.torch_compat import (
    can_count_groups,
    count_groups,
    is_destroyed,
    is_distributed,
    job_timeout,
)
from mcore.tensor.device import available_accelerator

Plan = TypeVar("Plan")
_FEW_RANKS = 100  # operations on tensors take longer than lists of so few
_Key = bytes  # the int64 ranks of a group: thousands of tuples would take seconds to handle

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


class SharedGroups:
    """Groups that were made together, this rank's group if it is in one, and their users."""

    # A weak reference: torch keeps a group until it is destroyed. A longer reference would keep
    # its threads, which abort the interpreter's exit.

    def __init__(
        self, keys: Iterable[_Key], own: _Key | None, group: dist.ProcessGroup | None
    ) -> None:
        self._users = dict.fromkeys(keys, 1)  # the number of ProcessGroups that use each
        self._own = b"" if group is None or own is None else own
        self._group = None if group is None else weakref.ref(group)

    def find(self, key: _Key) -> dist.ProcessGroup | None:
        """Return a group, or None if this rank is not in it or it no longer exists."""
        return self._group() if self._group is not None and key == self._own else None

    def is_usable(self, key: _Key) -> bool:
        """Return whether a group has users and still exists, which ranks outside cannot check."""
        if key == self._own and ((group := self.find(key)) is None or is_destroyed(group)):
            return False
        return self._users[key] > 0

    def use(self, key: _Key) -> None:
        """Count one more user of a group."""
        self._users[key] += 1

    def release(self, keys: Iterable[_Key]) -> None:
        """End one use of each group. Destroy this rank's group after its last use."""
        for key in keys:
            self._users[key] -= 1
        group = self.find(self._own)
        if group is not None and not self._users[self._own] and not is_destroyed(group):
            dist.destroy_process_group(group)


Uses = dict[SharedGroups, list[_Key]]
_Settings = tuple[str, str]  # backend, timeout
# The groups made in each world. Every rank records every group, also those it is not a member of.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Settings, dict[_Key, SharedGroups]]] = (
    weakref.WeakKeyDictionary()
)


def _list_shareable() -> dict[_Settings, dict[_Key, SharedGroups]]:
    """Return the groups of this world that can be shared, and drop destroyed groups."""
    made = _made.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), {})
    for groups in made.values():
        for key in [key for key, shared in groups.items() if not shared.is_usable(key)]:
            del groups[key]
    return made


def _describe_shareable() -> list[tuple[_Settings, str]]:
    """Return a text for the groups of each settings that can be shared."""
    texts = []
    for settings, groups in sorted(_list_shareable().items()):
        keys = sorted(groups)
        lengths = array("q", map(len, keys)).tobytes()
        if keys:
            texts.append((settings, hashlib.sha256(b"".join([*keys, lengths])).hexdigest()))
    return texts


def agree_on_plan(
    make_plan: Callable[[], Plan], facts: Callable[[Plan], Mapping[str, object]]
) -> Plan:
    """Make this rank's plan, or raise on all ranks if one rank cannot or if the facts differ.
    Collective on the world group: one all-reduce (MAX of 64 int64). None in a world of one rank.
    """
    if dist.get_world_size() == 1:
        return make_plan()
    failed, plan = list[Exception](), None
    own: Mapping[str, object] = {}
    try:
        plan = make_plan()
        own = facts(plan)
    except Exception as error:
        failed.append(error)
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    if not require_equal(own, failed, world, _describe_shareable()):
        _made.pop(world)  # some ranks have destroyed groups that others still have: share none
    return cast("Plan", plan)


class GroupMaker:
    """Creates one group for each set of ranks. All ranks make the same calls in the same order."""

    # On an accelerator every communicator costs memory and start-up time, and many parallelisms of
    # size 1 or of full size have the same ranks.

    def __init__(self, settings: GroupSettings, *, share: bool = True) -> None:
        self.used: Uses = {}
        self._settings = settings
        self._rank = dist.get_rank()
        # A rank is in few of the groups, and new_group takes 10 us for each of the others.
        self._counts_others = can_count_groups()
        self.timeout = settings.timeout or job_timeout()
        end = settings.backend or "", str(self.timeout)
        self._shared = _list_shareable().setdefault(end, {}) if share else {}
        # By options, the groups of this object's fields, None for those of other ranks.
        self._known: dict[int, dict[_Key, dist.ProcessGroup | None]] = {}
        if self.timeout == job_timeout() and settings.backend in (None, dist.get_backend()):
            self.adopt([range(dist.get_world_size())], dist.group.WORLD)

    def adopt(self, lists: RankLists, group: dist.ProcessGroup | None) -> None:
        """Record existing groups. ``group`` is this rank's group, if it is in any of the lists."""
        keys, own = self._read(lists)
        known = self._known.setdefault(0, {})
        for key in keys:
            known.setdefault(key, group if key == own else None)

    def knows(self, lists: RankLists, name: str) -> bool:
        """Return whether every list has a group."""
        options = self._identify_options(name)
        known, shared = self._known.get(options, {}), {} if options else self._shared
        return all(key in known or key in shared for key in self._read(lists)[0])

    def group_of(self, lists: RankLists, name: str) -> dist.ProcessGroup | None:
        """Return this rank's group among disjoint lists, and create all missing groups."""
        options = self._identify_options(name)
        known, shared = self._known.setdefault(options, {}), {} if options else self._shared
        keys, own = self._read(lists)
        needed = [key for key in keys if key not in known]
        for key in needed:
            if key in shared:
                shared[key].use(key)
                self.used.setdefault(shared[key], []).append(key)
        if new := [key for key in needed if key not in shared]:
            made = SharedGroups(new, own, self._make_groups(new, own, name))
            shared.update(dict.fromkeys(new, made))
            self.used[made] = new
        known.update(dict.fromkeys(needed))
        if own is not None and known[own] is None:
            known[own] = shared[own].find(own)
        return None if own is None else known[own]

    def _make_groups(
        self, keys: list[_Key], own: _Key | None, name: str
    ) -> dist.ProcessGroup | None:
        """Make one group after the other. Return this rank's group, if it is in one."""
        place = keys.index(own) if own in keys else len(keys)
        group = None
        count_groups(place if self._counts_others else 0)
        for key in keys[place : place + 1] if self._counts_others else keys:
            made = dist.new_group(
                memoryview(key).cast("q").tolist(),
                timeout=self.timeout,
                backend=self._settings.backend,
                pg_options=self._settings.options.get(name),
                group_desc=f"mcore_{name}",
            )
            group = made if key == own else group
        count_groups(len(keys[place + 1 :]) if self._counts_others else 0)
        return group

    def _read(self, lists: RankLists) -> tuple[list[_Key], _Key | None]:
        """Return the key of each group, and the key of the group that this rank is in."""
        if isinstance(lists, torch.Tensor) and lists.numel() < _FEW_RANKS:
            lists = lists.tolist()
        if not isinstance(lists, torch.Tensor):
            keys = [array("q", ranks).tobytes() for ranks in lists]
            return keys, next(
                (key for key, ranks in zip(keys, lists, strict=True) if self._rank in ranks), None
            )
        raw, width = bytes_of(lists), lists[:1].nbytes
        own = (lists == self._rank).nonzero().tolist()
        keys = [raw[at : at + width] for at in range(0, len(raw), width)]
        return keys, keys[own[0][0]] if own else None

    def _identify_options(self, name: str) -> int:
        return id(self._settings.options[name]) if name in self._settings.options else 0


@dataclass(frozen=True)
class GroupPlan:
    """The ranks of every group, computed equally on every rank before any group is made."""

    dense: Layout
    expert: Layout
    table: dict[str, RankLists]
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
    rows: dict[tuple[str, ...], torch.Tensor] = {}  # by axes, which several fields share
    table: dict[str, RankLists] = {}
    for name in wanted:
        if name == "hcp":
            continue
        axes = FIELD_AXES[name]
        if axes not in rows:
            rows[axes] = (expert if name in EXPERT_FIELDS else dense).rows(axes)
        table[name] = rows[axes]
        if name in EMBEDDING_FIELDS:
            table[name] = embedding_lists(rows[axes].tolist(), choices[name], name)
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
) -> tuple[dict[str, Any], Uses]:
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
    return made, maker.used


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
