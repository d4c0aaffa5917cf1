"""Creation of every process group from the sizes of the parallelisms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mcore.parallel.group_creation import GroupMaker
from mcore.parallel.rank_layout import (
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
from mcore.parallel.torch_compat import mesh_from_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["default_device_type", "groups_from_sizes", "rank_table"]


def groups_from_sizes(
    sizes: ParallelSizes,
    order: str,
    wanted: Sequence[str],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
    hcp_sizes: Sequence[int] | None,
    device_type: str | None,
) -> dict[str, Any]:
    """Create the wanted groups and, where all their axes are wanted, the two meshes.

    Collective on the world group; all ranks give the same arguments.

    Args:
        sizes: The sizes of the parallelisms.
        order: The order of the axes, fastest first.
        wanted: Names of fields, in the order of creation.
        choices: For ``embd`` and ``pos_embd`` which ranks of a pipeline belong to it.
        hcp_sizes: Factors of the context-parallel size, or None.
        device_type: The device type of the meshes; None lets the backend decide.

    Returns:
        The value of each field that was created.
    """
    world = dist.get_world_size()
    dense, expert = layouts_of_sizes(sizes, world, order)
    hcp_levels = [] if hcp_sizes is None else hierarchical_lists(dense.lists(["cp"]), hcp_sizes)
    table = rank_table(dense, expert, wanted, choices)
    maker = GroupMaker()
    made: dict[str, Any] = {
        name: maker.group_of(lists, f"mcore_{name}") for name, lists in table.items()
    }
    if "hcp" in wanted and hcp_levels:
        made["hcp"] = [
            maker.group_of(lists, f"mcore_hcp_{level}") for level, lists in enumerate(hcp_levels)
        ]
    kind = device_type or default_device_type()
    for field, layout in (("dense_mesh", dense), ("expert_mesh", expert)):
        made[field] = _mesh(layout, made, kind)
    return made


def rank_table(
    dense: Layout,
    expert: Layout,
    wanted: Sequence[str],
    choices: Mapping[str, Callable[[list[int]], Sequence[int]]],
) -> dict[str, list[list[int]]]:
    """List the ranks of every group of each wanted field, in the order of the fields.

    Args:
        dense: The layout of the dense view.
        expert: The layout of the expert view.
        wanted: Names of fields; ``hcp`` is left to :func:`hierarchical_lists`.
        choices: For ``embd`` and ``pos_embd`` which ranks of a pipeline belong to it.

    Returns:
        For each field disjoint ascending lists of global ranks.
    """
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
    return mesh_from_groups(groups, device_type, layout.ranks, layout.axes)


def default_device_type() -> str:
    """Return the accelerator's type where the world group serves it natively, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    backend = {kind: name for kind, _, name in pairs}.get(accelerator.type, "gloo")
    return "cpu" if backend == "gloo" else accelerator.type
