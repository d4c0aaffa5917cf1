"""How many rows of a tensor each rank of a group has, where they are not equally many."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.shortened import counted

CheckSizes: TypeAlias = "Callable[[Sequence[int] | None, Tensor, dist.ProcessGroup], Sizes]"
Sizes: TypeAlias = "tuple[int, ...] | None"  # rows of every rank; None: all have as many


def sizes_of_whole(given: Sequence[int] | None, input_: Tensor, group: dist.ProcessGroup) -> Sizes:
    """Return ``input_split_sizes`` as ints; ValueError unless they are those of an input."""
    sizes = checked_sizes("input_split_sizes", given, group)
    if sizes is not None:
        check_has_dims(input_)
        if sum(sizes) != input_.shape[0]:
            raise ValueError(
                f"input_split_sizes {list(sizes)} sums to {sum(sizes)}, an input of shape "
                f"{tuple(input_.shape)} has {counted(input_.shape[0], 'row')}"
            )
    return sizes


def sizes_of_parts(given: Sequence[int] | None, input_: Tensor, group: dist.ProcessGroup) -> Sizes:
    """Return ``output_split_sizes`` as ints; ValueError if this rank's is not its input's."""
    sizes = checked_sizes("output_split_sizes", given, group)
    if sizes is not None:
        check_has_dims(input_)
        own = sizes[group.rank()]
        if own != input_.shape[0]:
            raise ValueError(
                f"output_split_sizes {list(sizes)} gives rank {group.rank()} of the group "
                f"{counted(own, 'row')}, its input of shape {tuple(input_.shape)} has "
                f"{input_.shape[0]}"
            )
    return sizes


def checked_sizes(name: str, given: Sequence[int] | None, group: dist.ProcessGroup) -> Sizes:
    """Return the rows of every rank as ints; ValueError unless there is one number for each."""
    if given is None:
        return None
    sizes = tuple(operator.index(size) for size in given)
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(
            f"{name} must be {group.size()} numbers of 0 or more, one for each rank of the group, "
            f"got {list(sizes)}"
        )
    return sizes


def filled_up(part: Tensor, length: int) -> Tensor:
    """Return a tensor with rows of zeros added up to a length."""
    missing = length - part.shape[0]
    return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part


def check_has_dims(input_: Tensor) -> None:
    """Raise ValueError for a tensor that has no rows."""
    if input_.dim() == 0:
        raise ValueError(
            "a tensor without dims can be neither split over nor gathered from the ranks of a "
            "group: add a dim, e.g. input_.unsqueeze(0)"
        )
