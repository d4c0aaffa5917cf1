"""Creation of every process group from the sizes of the parallelisms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import reject_destroyed
from mcore.parallel.process_groups.creation import (
    GroupMaker,
    GroupSettings,
    SharedGroup,
    agree_on_plan,
)
from mcore.parallel.process_groups.layout import (
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    FIELD_AXES,
    GROUP_FIELDS,
    Layout,
    ParallelSizes,
    embedding_lists,
    hierarchical_lists,
    layouts_of_sizes,
)
from mcore.tensor.device import available_accelerator

NEEDS_INIT = (
    "needs torch.distributed, which is not initialised: "
    "call torch.distributed.init_process_group first"
)


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
    wanted: Sequence[str],
    order: str,
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
    hcp_sizes: Sequence[int] | None,
    device_type: str | None,
) -> GroupPlan:
    """Compute the ranks of the wanted groups and check the arguments. No communication."""
    dense, expert = layouts_of_sizes(sizes, dist.get_world_size(), order)
    hcp_levels = [] if hcp_sizes is None else hierarchical_lists(dense.lists(["cp"]), hcp_sizes)
    table = rank_table(dense, expert, wanted, choices)
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
    for field, layout in (("dense_mesh", plan.dense), ("expert_mesh", plan.expert)):
        if all(axis in made for axis in layout.axes):
            groups = [made[axis] for axis in layout.axes]
            made[field] = LazyMesh(layout, groups, plan.device_type)
    return made, list(maker.used.values())


def require_one_process(sizes: ParallelSizes, order: str, hcp_sizes: Sequence[int] | None) -> None:
    """Raise RuntimeError for a size above 1, since torch.distributed is not initialised."""
    given = {name: value for name, value in vars(sizes).items() if value > 1}
    if given:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise RuntimeError(f"{shown} {NEEDS_INIT}")
    layouts_of_sizes(sizes, 1, order)
    if hcp_sizes is not None:
        hierarchical_lists([[0]], hcp_sizes)


def rank_table(
    dense: Layout,
    expert: Layout,
    wanted: Sequence[str],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> dict[str, list[list[int]]]:
    """List the ranks of every group of each wanted field, in the order of the fields."""
    lists: dict[tuple[str, ...], list[list[int]]] = {}  # by axes, which several fields share
    table = {}
    for name in GROUP_FIELDS:
        if name not in wanted or name == "hcp":
            continue
        axes = FIELD_AXES[name]
        if axes not in lists:
            lists[axes] = (expert if name in EXPERT_FIELDS else dense).lists(axes)
        table[name] = lists[axes]
        if name in EMBEDDING_FIELDS:
            table[name] = embedding_lists(lists[axes], choices[name], name)
    return table


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
    if accelerator is None:
        return "cpu"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backend = {kind: name for kind, _, name in pairs}.get(accelerator.type, "gloo")
    return "cpu" if backend == "gloo" else accelerator.type
