"""Groups made once for each set of ranks, shared, and destroyed with their last user."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mcore.parallel.agreement import require_equal
from mcore.parallel.process_groups.layout import GROUP_FIELDS
from mcore.parallel.torch_compat import is_destroyed, job_timeout

Ranks = tuple[int, ...]
Plan = TypeVar("Plan")
_Key = tuple[Ranks, str, str]  # ranks, backend, timeout


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
        if self._group is None:
            return True
        group = self._group()
        return group is not None and not is_destroyed(group)

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
        self.timeout = settings.timeout or job_timeout()
        self._shared = _list_shareable() if share else {}
        self._own: dict[tuple[Ranks, int], dist.ProcessGroup | None] = {}
        is_like_world = self.timeout == job_timeout() and settings.backend in (
            None,
            dist.get_backend(),
        )
        if is_like_world:
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
        options_id, options = self._identify_options(name), self._settings.options.get(name)
        mine = None
        for ranks in map(tuple, rank_lists):
            if (ranks, options_id) not in self._own:
                key = self._make_key(ranks)
                shared = None if options_id else self._shared.get(key)
                if shared is None:
                    made = dist.new_group(
                        list(ranks),
                        timeout=self.timeout,
                        backend=self._settings.backend,
                        pg_options=options,
                        group_desc=f"mcore_{name}",
                    )
                    shared = SharedGroup(made if self._rank in ranks else None)
                    if options is None:
                        self._shared[key] = shared
                if id(shared) not in self.used:
                    self.used[id(shared)] = shared
                    shared.users += 1
                self._own[ranks, options_id] = shared.group
            if self._rank in ranks:
                mine = self._own[ranks, options_id]
        return mine

    def _make_key(self, ranks: Ranks) -> _Key:
        return ranks, self._settings.backend or "", str(self.timeout)

    def _identify_options(self, name: str) -> int:
        return id(self._settings.options[name]) if name in self._settings.options else 0
