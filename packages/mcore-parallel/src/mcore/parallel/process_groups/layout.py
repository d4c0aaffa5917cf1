"""The layout of ranks: arithmetic for the members of each group, without process groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import TypeAlias

import torch

Choose: TypeAlias = "Callable[[list[int]], Sequence[int]]"  # among the ranks of a pipeline
# The ranks of disjoint groups, in ascending order in each: int64 rows if all have one size.
RankLists: TypeAlias = "torch.Tensor | Sequence[Sequence[int]]"

# The axes of each group's field, the slowest first.
DENSE_FIELDS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "mp": ("pp", "tp"),
    "cp": ("cp",),
    "tp_cp": ("cp", "tp"),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "tp_dp_cp": ("dp", "cp", "tp"),
    "intra_dp_cp": ("dp", "cp"),
}
EXPERT_FIELDS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "tp_ep": ("ep", "expt_tp"),
    "tp_ep_pp": ("pp", "ep", "expt_tp"),
    "expt_dp": ("expt_dp",),
    "intra_expt_dp": ("expt_dp",),
}
EMBEDDING_FIELDS = ("embd", "pos_embd")
FIELD_AXES = {**DENSE_FIELDS, **EXPERT_FIELDS, "embd": ("pp",), "pos_embd": ("pp",)}
# All fields that can be created, in the order of creation, which must be equal on all ranks.
GROUP_FIELDS = (
    *("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp"),
    *("dp", "dp_cp", "tp_dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "hcp"),
)
ORDER_TOKENS = ("tp", "cp", "ep", "dp", "pp")
EXPERT_NAMES = {"tp": "expt_tp", "dp": "expt_dp"}  # axes of the expert layout by order token


@dataclass(frozen=True)
class Layout:
    """Global ranks (int64) arranged along named axes, the slowest axis first."""

    axes: tuple[str, ...]
    ranks: torch.Tensor

    @classmethod
    def row_major(cls, sizes: Mapping[str, int]) -> Layout:
        """Number the ranks 0, 1, ... with the last axis fastest."""
        shape = tuple(sizes.values())
        return cls(tuple(sizes), torch.arange(prod(shape), device="cpu").reshape(shape))

    def size(self, axis: str) -> int:
        """Return the length of an axis, 1 if the layout has no such axis."""
        return self.ranks.shape[self.axes.index(axis)] if axis in self.axes else 1

    def present(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes that the layout has, in the order of the layout."""
        wanted = set(axes)
        return tuple(axis for axis in self.axes if axis in wanted)

    def rows(self, axes: Iterable[str]) -> torch.Tensor:
        """Return groups of ranks that differ only along ``axes``: ascending rows of one tensor."""
        sources = [self.axes.index(axis) for axis in self.present(axes)]
        others = [place for place in range(len(self.axes)) if place not in sources]
        members = prod(self.ranks.shape[place] for place in sources)
        rows = self.ranks.permute(*others, *sources).reshape(-1, members).long()
        return rows if self._is_ascending else rows.sort(dim=1).values

    @cached_property
    def _is_ascending(self) -> bool:
        """Whether the rows of all axes are in ascending order, as in most layouts."""
        ranks = self.ranks.flatten().tolist()
        return bool(ranks == sorted(ranks))

    def lists(self, axes: Iterable[str]) -> list[list[int]]:
        """Return the :meth:`rows` as lists."""
        lists: list[list[int]] = self.rows(axes).tolist()
        return lists


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of the model parallelisms. The data-parallel sizes follow from the world's."""

    tp: int
    cp: int
    pp: int
    ep: int
    expt_tp: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_positive_int(name, value)

    def complete(self, world: int, *axes: str) -> dict[str, int]:
        """Return the sizes of some axes and of the remaining dp by order token.
        ValueError if the world cannot be divided.
        """
        sizes = [getattr(self, axis) for axis in axes]
        taken = prod(sizes)
        if world % taken:
            raise ValueError(
                f"the world size {world} is not divisible by {' * '.join(axes)} = "
                f"{' * '.join(map(str, sizes))} = {taken}: "
                "start another number of ranks or change the sizes"
            )
        tokens = [axis.removeprefix("expt_") for axis in axes]
        return {**dict(zip(tokens, sizes, strict=True)), "dp": world // taken}


def require_positive_int(name: str, value: object) -> None:
    """Raise TypeError for a value that is not an int and ValueError for an int below 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int of at least 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def layouts_of_sizes(sizes: ParallelSizes, world: int, order: str) -> tuple[Layout, Layout]:
    """Arrange ``world`` ranks into the dense and the expert layout, in the given order."""
    dense_sizes = sizes.complete(world, "tp", "cp", "pp")
    expert_sizes = sizes.complete(world, "expt_tp", "ep", "pp")
    slowest_first = _parse_order(order, (dense_sizes, expert_sizes))[::-1]
    dense = Layout.row_major({t: dense_sizes[t] for t in slowest_first if t in dense_sizes})
    expert = Layout.row_major(
        {EXPERT_NAMES.get(t, t): expert_sizes[t] for t in slowest_first if t in expert_sizes}
    )
    require_equal_pipelines(dense.rows(["pp"]), expert.rows(["pp"]), f"order {order!r}")
    return dense, expert


def _parse_order(order: str, sizes: Iterable[Mapping[str, int]]) -> list[str]:
    tokens = order.split("-")
    for token in tokens:
        if token not in ORDER_TOKENS:
            raise ValueError(
                f"order {order!r} has the unknown token {token!r}: "
                f"use each of {', '.join(ORDER_TOKENS)} at most once, joined by '-'"
            )
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"order {order!r} names an axis twice")
    missing = [token for token in ORDER_TOKENS if token not in tokens]
    for token in missing:
        size = max(of_layout.get(token, 1) for of_layout in sizes)
        if size > 1:
            raise ValueError(f"order {order!r} lacks {token!r}, whose size is {size}")
    return tokens + missing


def require_equal_pipelines(dense: torch.Tensor, expert: torch.Tensor, source: str) -> None:
    """Raise ValueError when the pipeline groups of the two layouts differ."""
    if torch.equal(dense, expert):
        return
    nobody: list[int] = []
    for mine, other in zip_longest(dense.tolist(), expert.tolist(), fillvalue=nobody):
        if mine != other:
            raise ValueError(
                f"the dense and the expert layout have different pp groups (from {source}): "
                f"{mine} and {other}. Put pp in the same place in both, such as last in the order"
            )


def wanted_fields(groups: Collection[str] | None) -> tuple[str, ...]:
    """Return the fields to create in the order of creation. ValueError for an unknown field."""
    if groups is None:
        return GROUP_FIELDS
    if isinstance(groups, str):
        raise TypeError(f"groups must be a collection of names, got the string {groups!r}")
    for name in groups:
        if name not in GROUP_FIELDS:
            raise ValueError(
                f"groups has {name!r}, which cannot be created. Known: {', '.join(GROUP_FIELDS)}"
            )
    return tuple(name for name in GROUP_FIELDS if name in groups)


def embedding_choices(word: Choose | None, position: Choose | None) -> dict[str, Choose]:
    """Return the functions that choose the ranks of each embedding from those of a pipeline."""
    return {
        "embd": word or (lambda ranks: [ranks[0], ranks[-1]]),
        "pos_embd": position or (lambda ranks: [ranks[0]]),
    }


def embedding_lists(pipelines: Sequence[list[int]], choose: Choose, field: str) -> list[list[int]]:
    """Choose the ranks of each pipeline that hold an embedding, and drop pipelines without any."""
    chosen = []
    for ranks in pipelines:
        some = sorted(set(choose(list(ranks))))
        if not set(some) <= set(ranks):
            raise ValueError(f"{field} has ranks {some}, which are not all in pipeline {ranks}")
        if some:
            chosen.append(some)
    return chosen


def hierarchical_lists(
    cp_lists: Sequence[list[int]], hcp_sizes: Sequence[int]
) -> list[list[list[int]]]:
    """Split every context-parallel group along the factors of its size, the first fastest."""
    cp = len(cp_lists[0])
    for size in hcp_sizes:
        require_positive_int("each of hcp_sizes", size)
    if prod(hcp_sizes) != cp:
        raise ValueError(
            f"the product of hcp_sizes {list(hcp_sizes)} is {prod(hcp_sizes)}, but cp is {cp}"
        )
    factors = len(hcp_sizes)
    grid = torch.tensor(cp_lists, device="cpu").reshape(-1, *reversed(hcp_sizes))
    return [
        grid.movedim(factors - level, -1).reshape(-1, size).tolist()
        for level, size in enumerate(hcp_sizes)
    ]
