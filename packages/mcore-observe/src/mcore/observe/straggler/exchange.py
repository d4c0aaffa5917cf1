"""Gathers what each rank says in a report: one collective, entered by every rank."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mcore.observe.straggler.gathered_rows import GatheredRows
from mcore.observe.straggler.rows import SCHEMA_VERSION, SECTIONS_HASH
from mcore.parallel.groups import GroupLike, as_process_group, comm_device
from mcore.parallel.torch_compat import all_gather_single, is_distributed

__all__ = ["Exchange"]

_HOST_BYTES = 64
_INTRODUCTION = struct.Struct(f"<qqq{_HOST_BYTES}s")  # schema, hash of sections, rank, host


class Exchange:
    """The ranks that report together.

    Args:
        group: The group; None is the world group. Without torch.distributed there is one rank.
        world: The number of ranks that the caller expects.

    Raises:
        ValueError: ``world`` is not the size of the group, or this rank is no member.
        TypeError: ``group`` is no group.

    Attributes:
        device: What the collective runs on: that of the group's backend.
        hosts: Host name of each rank in the group's order; known after :meth:`introduce`.
        ranks: The rank that each gave to ``configure``, likewise.
        rank_ids: The same, int64 ``[world]``.

    Example:
        >>> exchange = Exchange(None, world=1)
        >>> exchange.introduce(rank=0, sections_hash=5.0)
        >>> exchange.ranks, len(exchange.hosts)
        ((0,), 1)
    """

    def __init__(self, group: GroupLike | None, *, world: int) -> None:
        member = as_process_group(group)
        if member is None and is_distributed():
            member = dist.group.WORLD
        size = 1 if member is None else member.size()
        if world != size:
            raise ValueError(
                f"world is {world}, but the process group has {size} ranks; give its size, and "
                "initialise torch.distributed before configure() for more than one"
            )
        self._group = member if size > 1 else None
        self._size = size
        self.device = torch.device("cpu") if self._group is None else comm_device(self._group)
        self._has_gloo = _has_gloo(self._group)
        self.hosts: tuple[str, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self.rank_ids = torch.empty(0, dtype=torch.int64)

    def introduce(self, *, rank: int, sections_hash: float) -> None:
        """Tell the others this rank's host name and sections, the first time it is called.

        One all-gather of 88 bytes over the group; all of its ranks call it and get all names.

        Args:
            rank: The rank given to ``configure``.
            sections_hash: The hash of the section names.

        Raises:
            RuntimeError: On all ranks: some have other sections, another version of this package,
                or the same rank. Also when the collective fails.
        """
        if self.hosts:
            return
        host = socket.gethostname().encode()[:_HOST_BYTES]
        mine = _INTRODUCTION.pack(SCHEMA_VERSION, int(sections_hash), rank, host)
        rows = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8), rank)
        packed = bytes(rows.flatten().tolist())
        schemas, hashes, ranks, hosts = zip(*_INTRODUCTION.iter_unpack(packed), strict=True)
        _reject_differing(schemas, ranks, "version of the straggler report")
        _reject_differing(hashes, ranks, "sections")
        if sorted(ranks) != list(range(self._size)):
            raise RuntimeError(
                f"straggler report: the ranks given to configure() are {list(ranks)} in the "
                f"group's order; each of 0 to {self._size - 1} has to be given once"
            )
        self.ranks, self.rank_ids = ranks, torch.tensor(ranks)
        self.hosts = tuple(host.rstrip(b"\0").decode(errors="replace") for host in hosts)

    def gather(self, row: torch.Tensor, rank: int) -> GatheredRows:
        """Gather the rows of a report.

        One all-gather over the group, with gloo as an all-to-all in which each rank sends its row
        to all; every rank of the group calls it, with rows of equal length, and gets the result. No
        communication for one rank.

        Args:
            row: See :func:`mcore.observe.straggler.rows.encode_row`.
            rank: The rank given to ``configure``, for errors.

        Returns:
            What all ranks said, in the group's order.

        Raises:
            RuntimeError: On all ranks: some have other sections. Also when the collective fails.
        """
        rows = GatheredRows(self._gather(row, rank), self.ranks, self.rank_ids)
        _reject(rows.ranks_unlike(SECTIONS_HASH), "sections", len(self.ranks))
        return rows

    def _gather(self, row: torch.Tensor, rank: int) -> torch.Tensor:
        if self._group is None:
            return row.unsqueeze(0)
        row = row.to(self.device)
        rows = row.new_empty(self._size * row.numel())
        try:
            if self._has_gloo:
                # Its all-gather hands the rows on around a ring, one hop after the other. Sent to
                # each rank directly they arrive at once, and of so short a row the hops are what
                # costs: half the time with 4 ranks, and less with more. The group's own method
                # saves a tenth of a report of 2 ranks against dist.all_to_all_single.
                for_each = torch.cat([row] * self._size)  # a fifth of the time of repeat()
                self._group.alltoall_base(rows, for_each, [], []).wait()
            else:
                all_gather_single(rows, row, self._group)
            return rows.cpu().view(self._size, -1)
        except RuntimeError as error:
            raise RuntimeError(
                f"straggler report: gathering from {self._size} ranks failed on rank {rank}; a "
                "rank died, hangs or does not call report() as often as the others, or one was "
                f"configured anew: {error}"
            ) from error


def _has_gloo(group: GroupLike | None) -> bool:
    """Say whether CPU tensors of a group go through gloo."""
    return isinstance(group, dist.ProcessGroup) and "cpu:gloo" in dist.get_backend_config(group)


def _reject_differing(values: Sequence[float], ranks: Sequence[int], what: str) -> None:
    """Raise RuntimeError naming the ranks whose value is not that of rank 0."""
    expected = values[ranks.index(0)] if 0 in ranks else values[0]
    differing = [rank for rank, value in zip(ranks, values, strict=True) if value != expected]
    _reject(differing, what, len(ranks))


def _reject(ranks: Sequence[int], what: str, world: int) -> None:
    if ranks:
        raise RuntimeError(
            f"straggler report: ranks {sorted(ranks)} differ from rank 0 in the {what} given to "
            f"configure(); give all {world} ranks the same"
        )
