"""The rows of a report, one per rank, and the collective that sends them to all ranks.

A row is float64 of fixed length: the columns below, then four numbers per section.
"""

from __future__ import annotations

import math
import socket
import struct
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.straggler.ranges import COMPUTE_KIND, NO_STATS, SectionStats
from mcore.observe.straggler.sections import section_hash
from mcore.parallel.groups import GroupLike, as_process_group, comm_device
from mcore.parallel.torch_compat import all_gather_single, is_distributed
from mcore.tensor.device import resolve_device

SCHEMA, SECTIONS_HASH, ENABLED, WANTED, IDLE, ELAPSED = range(6)
ETPT, LOG_INTERVAL, TOTAL_FLOPS, DROPPED, NEXT_INTERVAL = range(11, 16)
SECTIONS_START = 16
STATS_PER_SECTION = 4  # count, sum_ms, median_ms, max_ms
_MUST_AGREE = slice(SECTIONS_HASH, ENABLED + 1)

# The columns from ELAPSED to ETPT, with the unit that is printed.
METRICS = {
    "elapsed_ms": "ms",
    "data_ms": "ms",
    "temp_c": "C",
    "power_w": "W",
    "util_pct": "%",
    "clock_mhz": "MHz",
    "etpt_tf": "TF",
}
UNKNOWN_METRICS = (math.nan,) * len(METRICS)

_SCHEMA_VERSION = 1
_HOST_BYTES, _DEVICE_BYTES, PEERS_BYTES = 64, 16, 32
# Schema, hash of sections, rank, host, device, label of the peers.
_INTRODUCTION = struct.Struct(f"<qqq{_HOST_BYTES}s{_DEVICE_BYTES}s{PEERS_BYTES}s")


def encode_row(
    sections_hash: float,
    stats: Mapping[int, SectionStats],
    num_sections: int,
    *,
    enabled: bool,
    wanted: bool,
    metrics: Sequence[float] = UNKNOWN_METRICS,
    log_interval: int = 0,
    total_flops: float = 0.0,
    dropped: int = 0,
    next_interval: int = 0,
) -> torch.Tensor:
    """Return one rank's row, ``[row_length(num_sections)]`` on the CPU.

    ``stats`` has a number for each section. Undeclared sections, from ``num_sections`` on, are left
    out. ``metrics`` are in the order of :data:`METRICS`, NaN if unknown.
    """
    is_idle = COMPUTE_KIND not in stats
    row: list[float] = [_SCHEMA_VERSION, sections_hash, enabled, wanted, is_idle, *metrics]
    row += (log_interval, total_flops, dropped, next_interval)
    for section in range(num_sections):
        of_section = stats.get(section, NO_STATS)
        row += (of_section.count, of_section.sum_ms, of_section.median_ms, of_section.max_ms)
    # torch.tensor inspects each number and needs three times as long.
    return torch.frombuffer(array("d", row), dtype=torch.float64)


def row_length(num_sections: int) -> int:
    """Return the length of a row. ``num_sections`` includes the two built-in sections."""
    return SECTIONS_START + STATS_PER_SECTION * num_sections


class GatheredRows:
    """The rows of one exchange, ``[world, length]``, and the decisions in the row of rank 0.

    ``ranks`` has the rank of each row, as given to ``configure``: 0 to ``world - 1`` in any order.
    ``order`` sorts the rows by rank. None means that they are sorted.
    """

    def __init__(
        self, matrix: torch.Tensor, ranks: tuple[int, ...], order: torch.Tensor | None = None
    ) -> None:
        self.matrix = matrix
        self.ranks = ranks
        self.order = order
        deciding = matrix[ranks.index(0)]
        numbers: list[float] = deciding.tolist()
        self.is_on = bool(numbers[ENABLED])
        self.wanted = bool(numbers[WANTED])
        self.has_interval = self.is_on and numbers[LOG_INTERVAL] > 0
        self.log_interval = int(numbers[LOG_INTERVAL]) if self.has_interval else 0
        self.total_flops = numbers[TOTAL_FLOPS]
        self._unlike = (matrix[:, _MUST_AGREE] != deciding[_MUST_AGREE]).nonzero().tolist()

    def next_interval(self) -> int:
        """Return the steps to the next report: the largest number that a rank wants."""
        return int(self.matrix[:, NEXT_INTERVAL].max())

    def metrics(self) -> torch.Tensor:
        """Return ``[7, world]`` in the order of :data:`METRICS`."""
        return self.matrix[:, ELAPSED : ETPT + 1].t().contiguous()

    def ranks_unlike(self, column: int) -> list[int]:
        """List the ranks that differ from rank 0 in ``SECTIONS_HASH`` or ``ENABLED``."""
        place = column - _MUST_AGREE.start
        return [self.ranks[index] for index, differing in self._unlike if differing == place]


class Exchange:
    """The ranks that report together. A group of None is the world, or this process alone.

    ``names`` are those of all sections, on which the ranks have to agree. ``computing`` is the
    device that this rank reports, None the current device. ``peers`` is the label of the ranks that
    this rank is compared with. Raises ValueError if ``world`` is not
    the size of the group or this rank is not a member.
    """

    def __init__(
        self,
        group: GroupLike | None,
        *,
        world: int,
        rank: int,
        names: Sequence[str],
        computing: torch.device | str | None = None,
        peers: str = "",
    ) -> None:
        member = as_process_group(group)
        if member is None and is_distributed():
            member = dist.group.WORLD
        size = 1 if member is None else member.size()
        if world != size:
            raise ValueError(
                f"world is {world}, but the process group has {size} ranks. Give its size. For "
                "several ranks, initialise torch.distributed before configure()"
            )
        # A strong reference would keep the group's threads after destroy_process_group(), and they
        # abort the process at its exit.
        self._group = weakref.ref(member) if size > 1 else None
        self._size = size
        self.device = torch.device("cpu") if size == 1 else comm_device(member)
        self._has_gloo = _has_gloo(member)
        self._rank, self._computing, self._label = rank, computing, peers
        self.sections_hash, self._num_sections = section_hash(names), len(names)
        # In the group's order, set by the first gather():
        self.hosts: tuple[str, ...] = ()
        self.devices: tuple[str, ...] = ()
        self.peers: tuple[str, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self._order: torch.Tensor | None = None

    def gather(
        self, stats: Mapping[int, SectionStats] | None = None, **columns: Any
    ) -> GatheredRows:
        """Exchange rows, with the columns of :func:`encode_row`, with the other ranks.

        Every rank calls it. Collective: an all-gather over the group, which gloo runs as an
        all-to-all, and another of names at the first call. No communication for a single rank.
        RuntimeError on all ranks if their sections differ.
        """
        if not self.hosts:
            self._introduce()
        row = encode_row(self.sections_hash, stats or {}, self._num_sections, **columns)
        rows = GatheredRows(self._gather(row), self.ranks, self._order)
        _reject_ranks(rows.ranks_unlike(SECTIONS_HASH), "sections", len(self.ranks))
        return rows

    def _introduce(self) -> None:
        """Exchange host names, devices, ranks and sections: an all-gather of 136 bytes.

        RuntimeError on all ranks if versions, sections or ranks do not match.
        """
        host = socket.gethostname().encode()[:_HOST_BYTES]
        # Not in __init__: a rank may choose its device after it has configured the detector.
        if self._group is not None:
            self.device = comm_device(self._group())
        device = str(resolve_device(self._computing)).encode()[:_DEVICE_BYTES]
        mine = _INTRODUCTION.pack(
            _SCHEMA_VERSION, int(self.sections_hash), self._rank, host, device, self._label.encode()
        )
        rows = self._gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        packed = bytes(rows.flatten().tolist())
        schemas, hashes, ranks, *texts = zip(*_INTRODUCTION.iter_unpack(packed), strict=True)
        _reject_differing(schemas, ranks, "version of the straggler report")
        _reject_differing(hashes, ranks, "sections")
        if sorted(ranks) != list(range(self._size)):
            raise RuntimeError(
                f"straggler report: the ranks given to configure() are {list(ranks)} in the "
                f"group's order; give each of 0 to {self._size - 1} once"
            )
        self.ranks = ranks
        self._order = None if sorted(ranks) == list(ranks) else torch.tensor(ranks).argsort()
        self.hosts, self.devices, self.peers = (
            tuple(text.rstrip(b"\0").decode(errors="replace") for text in of_ranks)
            for of_ranks in texts
        )

    def _gather(self, row: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return row.unsqueeze(0)
        group = self._group()
        if group is None:
            raise RuntimeError(
                "straggler report: the process group has been destroyed. Report before "
                "destroy_process_group(), or call configure() for the new group"
            )
        row = row.to(self.device)
        rows = row.new_empty(self._size * row.numel())
        try:
            if self._has_gloo:
                # gloo's all-gather passes the rows around a ring, hop by hop. Sending such a short
                # row to each rank directly halves the time with 4 ranks, and saves more with more.
                # dist.all_to_all_single would add a tenth to a report of 2 ranks.
                for_each = torch.cat([row] * self._size)  # a fifth of the time of repeat()
                group.alltoall_base(rows, for_each, [], []).wait()
            else:
                all_gather_single(rows, row, group)
            return rows.cpu().view(self._size, -1)
        except RuntimeError as error:
            raise RuntimeError(
                f"straggler report: gathering from {self._size} ranks failed on rank {self._rank}: "
                "a rank died, hangs, was configured twice, or does not call report() as often as "
                f"the others: {error}"
            ) from error


def _has_gloo(group: GroupLike | None) -> bool:
    """Return whether CPU tensors of a group go through gloo."""
    return isinstance(group, dist.ProcessGroup) and "cpu:gloo" in dist.get_backend_config(group)


def _reject_differing(values: Sequence[float], ranks: Sequence[int], what: str) -> None:
    """Raise a RuntimeError that names the ranks with another value than rank 0."""
    expected = values[ranks.index(0)] if 0 in ranks else values[0]
    differing = [rank for rank, value in zip(ranks, values, strict=True) if value != expected]
    _reject_ranks(differing, what, len(ranks))


def _reject_ranks(ranks: Sequence[int], what: str, world: int) -> None:
    if ranks:
        raise RuntimeError(
            f"straggler report: ranks {sorted(ranks)} differ from rank 0 in the {what} given to "
            f"configure(). Give all {world} ranks the same"
        )
