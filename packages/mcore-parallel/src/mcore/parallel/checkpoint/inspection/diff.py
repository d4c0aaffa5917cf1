"""The command ``diff``: keys in only one of two checkpoints, and differences of the others.

Both checkpoints are read in blocks on all cores. The memory does not grow with their size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch

from mcore.parallel.checkpoint.files.manifest import StoredKey
from mcore.parallel.checkpoint.files.places import PathLike
from mcore.parallel.checkpoint.inspection import contents
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.shortened import counted

_BLOCK_ELEMENTS = 1 << 20
_TWO_63 = 1 << 63


class Difference(NamedTuple):
    """The difference of two tensors of one shape."""

    elements: int = 0  # number that are not equal
    largest: float | int | None = 0  # absolute difference; NaN if only one is NaN, None if unknown

    def join(self, other: Difference) -> Difference:
        """Combine the differences of two parts of a tensor."""
        elements = self.elements + other.elements
        if self.largest is None or other.largest is None:
            return Difference(elements, None)
        largest = max(self.largest, other.largest, key=lambda one: (math.isnan(one), one))
        return Difference(elements, largest)


def diff(
    path: PathLike,
    other: PathLike,
    keys: Sequence[str],
    workers: int | None,
    output: contents.Output,
) -> int:
    """Compare two checkpoints. Returns 1 if they differ."""
    with contents.Contents(path) as old, contents.Contents(other) as new:
        # A pattern without a match in both checkpoints is an error.
        found = old.matching(keys) + new.matching(keys)
        names = sorted({*(found or new.names(keys))})
        added = [name for name in names if name not in old.index.keys]
        removed = [name for name in names if name not in new.index.keys]
        common = sorted({*names} - {*added, *removed})
        sizes = [contents.num_bytes_of(old.index.keys[name]) for name in common]
        changed = []
        with (
            output.progress("compared", sum(sizes)) as report,
            ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as executor,
        ):
            changes = executor.map(lambda name: _compare_key(old, new, name), common)
            for size, change in zip(sizes, changes, strict=True):
                report(size)
                if change is not None:
                    changed.append(change)
    content = {
        "old": str(old.directory),
        "new": str(new.directory),
        "added": added,
        "removed": removed,
        "changed": changed,
        "unchanged": len(common) - len(changed),
    }
    output.report(content, _format_lines(content))
    return 1 if added or removed or changed else 0


def _compare_key(
    old: contents.Contents, new: contents.Contents, name: str
) -> dict[str, Any] | None:
    """Describe the change of a key, or return None."""
    before, after = old.index.keys[name], new.index.keys[name]
    kinds = {"before": _describe_kind(name, before), "after": _describe_kind(name, after)}
    if before.dtype is None and after.dtype is None:
        if all(one == two for one, two in zip_longest(old.raw(name), new.raw(name))):
            return None
        for kind, side in (("before", old), ("after", new)):
            kinds[kind]["value"] = side.preview(name)
        return {"key": name, **kinds, "largest_difference": None}
    if before.dtype is None or after.dtype is None or before.shape != after.shape:
        return {"key": name, **kinds, "largest_difference": None}
    old.require_whole([name])
    new.require_whole([name])
    found = Difference()
    for start, shape in boxes(before.shape, _BLOCK_ELEMENTS):
        found = found.join(
            compare_tensors(old.box(name, start, shape), new.box(name, start, shape))
        )
    if not found.elements and before.dtype == after.dtype:
        return None
    counts = {"elements": prod(before.shape), "different": found.elements}
    return {"key": name, **kinds, **counts, "largest_difference": found.largest}


def _describe_kind(name: str, stored: StoredKey) -> dict[str, Any]:
    return {"dtype": contents.dtype_text(name, stored), "shape": list(stored.shape)}


def boxes(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield start and shape of boxes, of at most ``most`` elements, that make up a tensor."""
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    if row > most and len(shape) > 1:
        for first in range(shape[0]):
            for start, inside in boxes(shape[1:], most):
                yield (first, *start), (1, *inside)
        return
    step = max(1, most // max(1, row))
    for first in range(0, shape[0], step):
        yield (first, *[0] * len(shape[1:])), (min(step, shape[0] - first), *shape[1:])


def compare_tensors(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """Compare two tensors of one shape, bit by bit if they have one dtype."""
    one, other = one.reshape(-1), other.reshape(-1)
    if one.dtype == other.dtype:
        bits = [tensor.view(torch.uint8).view(-1, tensor.itemsize) for tensor in (one, other)]
        if torch.equal(*bits):
            return Difference()
        differs = (bits[0] != bits[1]).any(1)
    else:
        differs = torch.ones(one.shape, dtype=torch.bool, device="cpu")
    try:
        wide = [_widen(tensor[differs], one.dtype == other.dtype) for tensor in (one, other)]
    except (RuntimeError, NotImplementedError):  # a dtype without arithmetic
        return Difference(int(differs.sum()), None)
    if one.dtype == other.dtype:
        return Difference(int(differs.sum()), _find_largest(*wide))
    is_other = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
    return Difference(int(is_other.sum()), _find_largest(wide[0][is_other], wide[1][is_other]))


def _widen(tensor: torch.Tensor, keeps_integers: bool) -> torch.Tensor:
    """Convert numbers to a type that can be subtracted, and keep their order."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return (tensor if tensor.itemsize > 1 else tensor.float()).double()
    if not keeps_integers:
        return tensor.double()
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ -_TWO_63  # shifts the range: 0 becomes the lowest int64
    return tensor.long()


def _find_largest(one: torch.Tensor, other: torch.Tensor) -> float | int:
    if not one.numel():
        return 0
    if one.dtype == torch.int64:
        distance = torch.maximum(one, other) - torch.minimum(one, other)
        # A distance of 2**63 or more overflows to a negative number, 2**64 below the distance.
        beyond = distance[distance < 0]
        return int(beyond.max()) + 2 * _TWO_63 if beyond.numel() else int(distance.max())
    distance = (one - other).abs()
    both_nan = one.isnan() & other.isnan()
    distance[both_nan | (one == other)] = 0.0  # different bits of one value, such as -0.0 and 0.0
    return float(distance.max())


def _format_lines(content: dict[str, Any]) -> Iterator[str]:
    for title, names in (("added", content["added"]), ("removed", content["removed"])):
        yield from (f"{title}  {contents.escaped(name)}" for name in names)
    if content["changed"]:
        rows = [
            ["changed", one["key"], *_format_change(one), _format_number(one["largest_difference"])]
            for one in content["changed"]
        ]
        titles = ["", "key", "what", "elements", "largest difference"]
        yield from contents.table(titles, rows)
    numbers = [f"{len(content[name])} {name}" for name in ("added", "removed", "changed")]
    yield f"{', '.join(numbers)}, {counted(content['unchanged'], 'key')} unchanged"


def _format_change(change: dict[str, Any]) -> tuple[str, str]:
    before, after = change["before"], change["after"]
    if before["shape"] != after["shape"]:
        what = f"{before['dtype']} {before['shape']} -> {after['dtype']} {after['shape']}"
    elif before["dtype"] != after["dtype"]:
        what = f"{before['dtype']} -> {after['dtype']}"
    elif before.get("value") and after.get("value"):
        what = f"{before['value']} -> {after['value']}"
    else:
        what = before["dtype"]
    counts = f"{change['different']} of {change['elements']}" if "elements" in change else ""
    return what, counts


def _format_number(number: float | int | None) -> str:
    if number is None:
        return ""
    return str(number) if isinstance(number, int) else f"{number:.6g}"
