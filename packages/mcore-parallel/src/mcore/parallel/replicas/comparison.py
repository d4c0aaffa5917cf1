"""Comparison of parameter lists and of their digests over a group of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mcore.parallel.agreement import first_difference
from mcore.parallel.groups import comm_device
from mcore.parallel.replicas.hashing import NamedParam
from mcore.tensor.dtensor import is_dtensor

DIGEST_BYTES = 16  # of XXH3-128


def describe_param(named: NamedParam, layout: str, *, with_dtype: bool) -> str:
    """Return what must be equal on two ranks for the bytes of a parameter to be comparable."""
    param = named.param
    words = [f"{named.name!r} of model chunk {named.chunk}", f"shape {tuple(param.shape)}"]
    if with_dtype:
        words.append(str(param.dtype))
    if layout:
        words.append(layout)
    for path, tensor in named.parts:
        if not path:
            continue
        words.append(path.rstrip("."))
        if not is_dtensor(param):  # whose shards may be uneven
            words.append(f"shape {tuple(tensor.shape)}")
        if with_dtype:
            words.append(str(tensor.dtype))
    return ", ".join(words)


def structure_digest(descriptions: Sequence[str]) -> bytes:
    """Return a 20-byte digest of a list of texts."""
    return _digest(repr(list(descriptions)))


def raise_difference(descriptions: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank of a group whose lists differ, naming the first difference.
    Two all-reduces: MAX of two int64, and MAX of 40 uint8 for each entry that all ranks have.
    """
    counts = torch.tensor([len(descriptions), -len(descriptions)], device=comm_device(group))
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    most, minus_fewest = counts.tolist()
    position = first_difference(list(map(_digest, descriptions[:-minus_fewest])), group)
    here = descriptions[position] if position < len(descriptions) else "nothing"
    raise ValueError(
        f"the ranks of the group do not have the same parameters: rank {dist.get_rank()} has "
        f"{len(descriptions) - 1}, the group between {-minus_fewest - 1} and {most - 1}; "
        f"the first difference is number {position}, here {here}. Check replicas of one model "
        "with the same arguments, over a group whose ranks hold copies"
    )


def _digest(text: str) -> bytes:
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()


class HashTable(NamedTuple):
    """This rank's digests as rows of a table that all ranks of a group have in common."""

    rows: torch.Tensor  # of each digest, int64 [n]
    digests: torch.Tensor  # uint8 [n, 16]
    num_rows: int  # of the whole table, the same on all ranks
    is_full: bool  # whether every rank holds a digest for every row, the same on all ranks


def hash_table(
    rows: Sequence[int], digests: Sequence[bytes], num_rows: int, *, is_full: bool
) -> HashTable:
    """Pack digests, each of 16 bytes, into a table."""
    packed = torch.zeros(len(digests), DIGEST_BYTES, dtype=torch.uint8, device="cpu")
    if digests:
        packed = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    return HashTable(
        torch.tensor(rows, dtype=torch.int64, device="cpu"),
        packed.view(-1, DIGEST_BYTES),
        num_rows,
        is_full,
    )


def agree_on_all_ranks(table: HashTable, group: dist.ProcessGroup) -> bool:
    """Return whether, in every row, all ranks that hold a digest hold the same.
    One all-reduce (MAX of uint8, 32 bytes a row); zeros of ranks that hold none change nothing.
    """
    # The maxima of ``h`` and of ``255 - h`` add up to 255 only if all digests of the row are equal.
    both = torch.zeros(2, table.num_rows, DIGEST_BYTES, dtype=torch.uint8, device="cpu")
    both[0, table.rows] = table.digests
    both[1, table.rows] = 255 - table.digests
    highest, inverse_of_lowest = _max_reduced(both, group)
    return bool((highest == 255 - inverse_of_lowest).all())


def differing_from_first(table: HashTable, group: dist.ProcessGroup) -> list[int]:
    """List which of this rank's digests differ from those of the first rank that holds the row.
    A full table costs one broadcast of 16 bytes a row, another one two all-reduces (MAX).
    """
    if table.is_full:
        reference = table.digests.to(comm_device(group))
        if group.rank() != 0:
            reference = torch.empty_like(reference)
        dist.broadcast(reference, group=group, group_src=0)
        expected = reference.cpu()
    else:
        expected = _digests_of_first_holders(table, group)
    return (expected != table.digests).any(dim=1).nonzero().flatten().tolist()


def _digests_of_first_holders(table: HashTable, group: dist.ProcessGroup) -> torch.Tensor:
    """Return, for each of this rank's rows, the digest of the lowest rank that holds it."""
    precedence = group.size() - group.rank()
    holders = torch.zeros(table.num_rows, dtype=torch.int64, device="cpu")
    holders[table.rows] = precedence
    is_first = _max_reduced(holders, group)[table.rows] == precedence
    reference = torch.zeros(table.num_rows, DIGEST_BYTES, dtype=torch.uint8, device="cpu")
    reference[table.rows[is_first]] = table.digests[is_first]
    return _max_reduced(reference, group)[table.rows]


def _max_reduced(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    on_device = message.to(comm_device(group))
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
    return on_device.cpu()
