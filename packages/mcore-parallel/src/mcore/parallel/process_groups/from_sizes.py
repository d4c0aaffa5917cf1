"""Creation of every process group from the sizes of the parallelisms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import max_or_raise, text_digest
from mcore.parallel.process_groups.layout import (
    DENSE_FIELDS,
    EMBEDDING_FIELDS,
    EXPERT_FIELDS,
    GROUP_FIELDS,
    Layout,
    ParallelSizes,
    embedding_lists,
    hierarchical_lists,
    layouts_of_sizes,
)
from mcore.tensor.device import available_accelerator

SIZE_NAMES = ("tp", "cp", "pp", "ep", "expt_tp")


@dataclass(frozen=True)
class GroupPlan:
    """The ranks of every group, worked out alike on every rank before any group is made."""

    sizes: ParallelSizes
    dense: Layout
    expert: Layout
    table: dict[str, list[list[int]]]
    hcp_levels: list[list[list[int]]]
    device_type: str
    digest: int


def plan_groups(
    sizes: ParallelSizes,
    wanted: Sequence[str],
    order: str,
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
    hcp_sizes: Sequence[int] | None,
    device_type: str | None,
) -> GroupPlan:
    """Work out the wanted groups and check the arguments; no communication."""
    dense, expert = layouts_of_sizes(sizes, dist.get_world_size(), order)
    hcp_levels = [] if hcp_sizes is None else hierarchical_lists(dense.lists(["cp"]), hcp_sizes)
    table = rank_table(dense, expert, wanted, choices)
    kind = device_type or default_device_type()
    chosen = [table.get(name) for name in EMBEDDING_FIELDS]
    facts = repr((order, tuple(wanted), hcp_sizes and tuple(hcp_sizes), kind, chosen))
    levels = hcp_levels if "hcp" in wanted else []
    return GroupPlan(sizes, dense, expert, table, levels, kind, text_digest(facts))


def agreed_plan(make_plan: Callable[[], GroupPlan]) -> GroupPlan:
    """Make this rank's plan, or raise on all ranks where one cannot, or where the plans differ.
    Collective on the world group: one all-reduce (MAX of 13 int64); none in a world of one rank.
    """
    if dist.get_world_size() == 1:
        return make_plan()
    facts, error = [0] * (len(SIZE_NAMES) + 1), None
    try:
        plan = make_plan()
        facts = [*(getattr(plan.sizes, name) for name in SIZE_NAMES), plan.digest]
    except Exception as own_error:
        error = own_error
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    extremes = max_or_raise([*facts, *(-fact for fact in facts)], error, world)
    different = [
        f"{name} is {-minus_lowest} to {highest} ({own} here)"
        for name, own, highest, minus_lowest in zip(
            SIZE_NAMES, facts, extremes, extremes[len(facts) :], strict=False
        )
        if highest != -minus_lowest
    ]
    if not different and extremes[len(facts) - 1] != -extremes[-1]:
        different = ["order, groups, hcp_sizes, device_type or the embedding ranks differ"]
    if different:
        raise ValueError(
            f"the ranks were given different arguments: {', '.join(different)}; "
            "call from_sizes with the same ones on every rank"
        )
    return plan


def groups_of_plan(plan: GroupPlan) -> dict[str, Any]:
    """Create the groups of a plan and, where all their axes are wanted, the two meshes.
    Collective on the world group; all ranks pass the same plan.
    """
    maker = GroupMaker()
    made: dict[str, Any] = {
        name: maker.group_of(lists, f"mcore_{name}") for name, lists in plan.table.items()
    }
    if plan.hcp_levels:
        made["hcp"] = [
            maker.group_of(lists, f"mcore_hcp_{level}")
            for level, lists in enumerate(plan.hcp_levels)
        ]
    for field, layout in (("dense_mesh", plan.dense), ("expert_mesh", plan.expert)):
        made[field] = _mesh(layout, made, plan.device_type)
    return made


def rank_table(
    dense: Layout,
    expert: Layout,
    wanted: Sequence[str],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> dict[str, list[list[int]]]:
    """List the ranks of every group of each wanted field, in the order of the fields."""
    table = {}
    for name in GROUP_FIELDS:
        if name not in wanted:
            continue
        if name in EMBEDDING_FIELDS:
            table[name] = embedding_lists(dense.lists(["pp"]), choices[name], name)
        elif name in DENSE_FIELDS:
            table[name] = dense.lists(DENSE_FIELDS[name])
        elif name in EXPERT_FIELDS:
            table[name] = expert.lists(EXPERT_FIELDS[name])
    return table


def _mesh(layout: Layout, made: Mapping[str, Any], device_type: str) -> DeviceMesh | None:
    if not all(axis in made for axis in layout.axes):
        return None
    groups = [made[axis] for axis in layout.axes]
    return DeviceMesh.from_group(groups, device_type, mesh=layout.ranks, mesh_dim_names=layout.axes)


def default_device_type() -> str:
    """Return the accelerator's type where the world group serves it natively, else ``"cpu"``."""
    accelerator = available_accelerator()
    if accelerator is None:
        return "cpu"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backend = {kind: name for kind, _, name in pairs}.get(accelerator.type, "gloo")
    return "cpu" if backend == "gloo" else accelerator.type


class GroupMaker:
    """Creates a group for each set of ranks, once; all ranks make the same calls in order."""

    # On an accelerator every communicator costs memory and start-up time, and many parallelisms of
    # size 1 or of full size have the same ranks.

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        everyone = tuple(range(dist.get_world_size()))
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {everyone: dist.group.WORLD}

    def adopt(self, rank_lists: Iterable[Sequence[int]], group: dist.ProcessGroup | None) -> None:
        """Remember groups that exist; ``group`` is the one of this rank, if it is in any."""
        for ranks in rank_lists:
            self._made.setdefault(tuple(ranks), group if self._rank in ranks else None)

    def knows(self, rank_lists: Iterable[Sequence[int]]) -> bool:
        """Return whether every one of the lists has its group."""
        return all(tuple(ranks) in self._made for ranks in rank_lists)

    def group_of(
        self, rank_lists: Sequence[Sequence[int]], description: str
    ) -> dist.ProcessGroup | None:
        """Return this rank's group among disjoint lists, creating those that do not exist."""
        missing = [list(ranks) for ranks in rank_lists if tuple(ranks) not in self._made]
        if missing:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration  # torch leaves it untyped
            mine, _ = enumerate_groups(missing, group_desc=description)
            self.adopt(missing, mine)
        own = next((tuple(ranks) for ranks in rank_lists if self._rank in ranks), None)
        return None if own is None else self._made[own]
