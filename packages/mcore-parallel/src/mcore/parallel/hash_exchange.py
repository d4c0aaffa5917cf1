"""Comparison of digests over a group, in messages that do not grow with its size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from mcore.parallel.groups import comm_device

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DIGEST_BYTES", "HashTable", "agree_on_all_ranks", "differing_from_first", "hash_table"]

DIGEST_BYTES = 20  # of SHA-1


class HashTable(NamedTuple):
    """This rank's digests as rows of a table that all ranks of a group have in common.

    Attributes:
        rows: The row of each digest, int64 ``[n]``.
        digests: uint8 ``[n, 20]``.
        num_rows: The rows of the whole table, n or more; the same on all ranks.
        is_full: Whether every rank holds a digest for every row; the same on all ranks.
    """

    rows: torch.Tensor
    digests: torch.Tensor
    num_rows: int
    is_full: bool


def hash_table(
    rows: Sequence[int], digests: Sequence[bytes], num_rows: int, *, is_full: bool
) -> HashTable:
    """Pack digests, each of 20 bytes, into a table.

    Example:
        >>> hash_table([2], [bytes(20)], 4, is_full=False).digests.shape
        torch.Size([1, 20])
    """
    packed = torch.zeros(len(digests), DIGEST_BYTES, dtype=torch.uint8)
    if digests:
        packed = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    return HashTable(
        torch.tensor(rows, dtype=torch.int64), packed.view(-1, DIGEST_BYTES), num_rows, is_full
    )


def agree_on_all_ranks(table: HashTable, group: dist.ProcessGroup) -> bool:
    """Say whether, in every row, all ranks that hold a digest hold the same; one holds one.

    One all-reduce (MAX of uint8, 40 bytes for each row) over ``group``; every rank of it calls
    this and gets the same answer. A digest ``h`` travels with ``255 - h``: the maximum of the first
    and that of the second still add up to 255 only if all digests of the row were equal. Zeros of
    ranks that hold none change neither.
    """
    both = torch.zeros(2, table.num_rows, DIGEST_BYTES, dtype=torch.uint8)
    both[0, table.rows] = table.digests
    both[1, table.rows] = 255 - table.digests
    highest, inverse_of_lowest = _max_reduced(both, group)
    return bool((highest == 255 - inverse_of_lowest).all())


def differing_from_first(table: HashTable, group: dist.ProcessGroup) -> list[int]:
    """List which of this rank's digests differ from those of the first rank that holds the row.

    Every rank of ``group`` calls this. A full table costs one broadcast from the group's first rank
    (20 bytes for each row), another one all-reduce (MAX of int64) to find the first holders and one
    (MAX of uint8) to hear from them.

    Returns:
        Indices into the table's digests, ascending; another list on each rank.
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
    holders = torch.zeros(table.num_rows, dtype=torch.int64)
    holders[table.rows] = precedence
    is_first = _max_reduced(holders, group)[table.rows] == precedence
    reference = torch.zeros(table.num_rows, DIGEST_BYTES, dtype=torch.uint8)
    reference[table.rows[is_first]] = table.digests[is_first]
    return _max_reduced(reference, group)[table.rows]


def _max_reduced(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    on_device = message.to(comm_device(group))
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
    return on_device.cpu()
