"""Two checkpoints key by key: what is in one only, what differs and by how much.

Both are read block by block on all cores, so that memory does not grow with their size.
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

from mcore.parallel.checkpoint.files.index import StoredKey
from mcore.parallel.checkpoint.files.regular_files import PathLike
from mcore.parallel.checkpoint.inspection.contents import Contents, dtype_text, num_bytes_of
from mcore.parallel.checkpoint.inspection.output import Output, escaped, table
from mcore.parallel.checkpoint.sharded import Shape
from mcore.parallel.shortened import counted

_BLOCK_ELEMENTS = 1 << 20
_TWO_63 = 1 << 63


class Difference(NamedTuple):
    """How two tensors of one shape differ; neutral where they are equal."""

    elements: int = 0  # that are not equal
    largest: float | int | None = 0  # of their absolute differences; NaN where only one is NaN

    def joined(self, other: Difference) -> Difference:
        """Return the difference of two tensors of which these are parts."""
        return Difference(self.elements + other.elements, _larger(self.largest, other.largest))


def _larger(one: float | int | None, other: float | int | None) -> float | int | None:
    if one is None or other is None:
        return None
    return max(one, other, key=lambda number: (math.isnan(number), number))


def diff(
    path: PathLike,
    other: PathLike,
    patterns: Sequence[str],
    workers: int | None,
    output: Output,
) -> int:
    """Compare two checkpoints; 1 if they differ."""
    with Contents(path) as old, Contents(other) as new:
        names = sorted({*_chosen(old, new, patterns), *_chosen(new, old, patterns)})
        added = [name for name in names if name not in old.index.keys]
        removed = [name for name in names if name not in new.index.keys]
        common = sorted({*names} - {*added, *removed})
        changed = list(_changes(old, new, common, workers, output))
    content = {
        "old": str(old.directory),
        "new": str(new.directory),
        "added": added,
        "removed": removed,
        "changed": changed,
        "unchanged": len(common) - len(changed),
    }
    output.report(content, _lines(content))
    return 1 if added or removed or changed else 0


def _chosen(contents: Contents, other: Contents, patterns: Sequence[str]) -> list[str]:
    """List the keys that match; that one of two checkpoints has none is no mistake."""
    if patterns and not contents.matching(patterns):
        other.names(patterns)
    return contents.matching(patterns)


def _changes(
    old: Contents, new: Contents, names: Sequence[str], workers: int | None, output: Output
) -> Iterator[dict[str, Any]]:
    sizes = [num_bytes_of(new.index.keys[name]) for name in names]
    done = 0
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as executor:
        found = executor.map(lambda name: _change(old, new, name), names)
        for size, change in zip(sizes, found, strict=True):
            done += size
            output.progress(done, sum(sizes), "compared")
            if change is not None:
                yield change


def _change(old: Contents, new: Contents, name: str) -> dict[str, Any] | None:
    """Return what changed of a key, or None."""
    before, after = old.index.keys[name], new.index.keys[name]
    kinds = {"before": _kind(before), "after": _kind(after)}
    if before.dtype is None and after.dtype is None:
        if all(one == two for one, two in zip_longest(old.raw(name), new.raw(name))):
            return None
        for kind, contents in (("before", old), ("after", new)):
            kinds[kind]["value"] = contents.preview(name)
        return {"key": name, **kinds, "largest_difference": None}
    if before.dtype is None or after.dtype is None or before.shape != after.shape:
        return {"key": name, **kinds, "largest_difference": None}
    found = Difference()
    for start, shape in boxes(before.shape, _BLOCK_ELEMENTS):
        found = found.joined(difference(old.box(name, start, shape), new.box(name, start, shape)))
    if not found.elements and before.dtype == after.dtype:
        return None
    counts = {"elements": prod(before.shape), "different": found.elements}
    return {"key": name, **kinds, **counts, "largest_difference": found.largest}


def _kind(stored: StoredKey) -> dict[str, Any]:
    return {"dtype": dtype_text(stored), "shape": list(stored.shape)}


def boxes(shape: Shape, most: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield start and shape of boxes of at most so many elements that make up a tensor."""
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


def difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """Compare two tensors of one shape, bit by bit where they have one dtype."""
    one, other = one.reshape(-1), other.reshape(-1)
    if one.dtype == other.dtype:
        bits = [tensor.view(torch.uint8).view(-1, tensor.itemsize) for tensor in (one, other)]
        if torch.equal(*bits):
            return Difference()
        differs = (bits[0] != bits[1]).any(1)
    else:
        differs = torch.ones(one.shape, dtype=torch.bool, device="cpu")
    try:
        wide = [_widened(tensor[differs], one.dtype == other.dtype) for tensor in (one, other)]
    except (RuntimeError, NotImplementedError):  # a dtype that has no numbers
        return Difference(int(differs.sum()), None)
    if one.dtype == other.dtype:
        return Difference(int(differs.sum()), _largest(*wide))
    is_other = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
    return Difference(int(is_other.sum()), _largest(wide[0][is_other], wide[1][is_other]))


def _widened(tensor: torch.Tensor, keeps_integers: bool) -> torch.Tensor:
    """Return numbers in a type in which they can be subtracted, all in the same order."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.is_floating_point():
        return (tensor if tensor.itemsize > 1 else tensor.float()).double()
    if not keeps_integers:
        return tensor.double()
    if tensor.dtype == torch.uint64:
        return tensor.view(torch.int64) ^ -_TWO_63  # from 0 on becomes from the lowest on
    return tensor.long()


def _largest(one: torch.Tensor, other: torch.Tensor) -> float | int:
    if not one.numel():
        return 0
    if one.dtype == torch.int64:
        distance = torch.maximum(one, other) - torch.minimum(one, other)
        beyond = distance[distance < 0]  # too large for 63 bits
        return int(beyond.max()) + 2 * _TWO_63 if beyond.numel() else int(distance.max())
    distance = (one - other).abs()
    both_nan = one.isnan() & other.isnan()
    distance[both_nan | (one == other)] = 0.0  # other bits of one value
    return float(distance.max())


def _lines(content: dict[str, Any]) -> Iterator[str]:
    for title, names in (("added", content["added"]), ("removed", content["removed"])):
        yield from (f"{title}  {escaped(name)}" for name in names)
    if content["changed"]:
        rows = [
            ["changed", one["key"], *_change_texts(one), _number_text(one["largest_difference"])]
            for one in content["changed"]
        ]
        titles = ["", "key", "what", "elements", "largest difference"]
        yield from table(titles, rows)
    numbers = [f"{len(content[name])} {name}" for name in ("added", "removed", "changed")]
    yield f"{', '.join(numbers)}, {counted(content['unchanged'], 'key')} unchanged"


def _change_texts(change: dict[str, Any]) -> tuple[str, str]:
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


def _number_text(number: float | int | None) -> str:
    if number is None:
        return ""
    return str(number) if isinstance(number, int) else f"{number:.6g}"
