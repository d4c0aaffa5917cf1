"""Do boxes in a grid of integers overlap?"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["Box", "overlapping_pairs"]

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]


def overlapping_pairs(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Find pairs of different boxes that share a cell.

    Boxes of one shape at multiples of that shape are settled without comparing them; otherwise a
    sweep along the axis with most starts compares only boxes that are open at the same place.

    Args:
        boxes: Offset and shape each, none empty, none equal to another.

    Returns:
        Index pairs, the smaller first.

    Example:
        >>> overlapping_pairs([((0, 0), (2, 4)), ((1, 3), (2, 4)), ((4, 0), (2, 4))])
        [(0, 1)]
    """
    if len(boxes) < 2 or not boxes[0][0] or _are_cells_of_one_grid(boxes):
        return []
    axis = max(range(len(boxes[0][0])), key=lambda a: len({offset[a] for offset, _ in boxes}))
    pairs: list[tuple[int, int]] = []
    open_boxes: list[tuple[int, int]] = []
    for place in sorted(range(len(boxes)), key=lambda i: boxes[i][0][axis]):
        offset, shape = boxes[place]
        while open_boxes and open_boxes[0][0] <= offset[axis]:
            heappop(open_boxes)
        for _, other in open_boxes:
            if _share_a_cell(boxes[place], boxes[other]):
                pairs.append((min(place, other), max(place, other)))
        heappush(open_boxes, (offset[axis] + shape[axis], place))
    return sorted(pairs)


def _are_cells_of_one_grid(boxes: Sequence[Box]) -> bool:
    shape = boxes[0][1]
    return all(
        other == shape and all(start % size == 0 for start, size in zip(offset, shape, strict=True))
        for offset, other in boxes
    )


def _share_a_cell(first: Box, second: Box) -> bool:
    return all(
        start < other + other_size and other < start + size
        for start, size, other, other_size in zip(*first, *second, strict=True)
    )
