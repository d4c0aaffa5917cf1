"""Ranks that are processes of this machine, joined by gloo, through the phases of a job."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe import StragglerDetector
from mcore.parallel import ProcessGroups, agreement
from mcore.parallel.checkpoint import (
    ShardedTensor,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from pretrain.cli.store import open_store
from rank_testing import preload, run_ranks
from scale.meter import Cost, Meter

REAL, REAL_SIZES = "real-ranks", (16, 64, 256)
CYCLES, FEW_CYCLES, MANY_RANKS = 20, 2, 128
_PHASES = ("start", "groups", "agreed_error", "report", "save", "load", "exit")
preload("torch.distributed.checkpoint", "torch.distributed.tensor", "mcore.observe.straggler")
# Else each group connects all of its ranks to each other at its start, 32,640 pairs of 256 ranks.
_CONNECTIONS = {"TORCH_GLOO_LAZY_INIT": "1"}
_PATIENCE_S = 60.0  # for connections that close


def real_ranks(meter: Meter) -> None:
    """Processes that are forked on this machine, 20 times through the phases of a job.

    With 128 ranks or more it is twice: 256 ranks have 8,000 threads, and a cycle takes minutes.
    gloo connects two ranks when they first exchange a message. All ranks share the cores, and a
    ring of N ranks needs N turns of each: much of the growth is due to this machine.

    The times are those on the clock until the last rank has finished, the median of all cycles.
    The memory is the private memory of the largest rank after the first time, above that before. A
    cycle that leaves a thread, a file, or a key in the store is an error. The addresses that gloo
    leaves in the store for each group do not count.
    """
    cycles = CYCLES if meter.ranks < MANY_RANKS else FEW_CYCLES
    with tempfile.TemporaryDirectory() as folder:
        store = open_store("127.0.0.1")
        arguments = store.port, folder, cycles
        ranks = run_ranks(
            _be_a_rank, meter.ranks, *arguments, init=None, timeout_s=3600, env=_CONNECTIONS
        )
    for phase in _PHASES:
        seconds = [max(rank[cycle][phase][0] for rank in ranks) for cycle in range(cycles)]
        memory = max(rank[0][phase][1] for rank in ranks)
        meter.costs.append(
            Cost(meter.ranks, f"all, {phase.replace('_', ' ')}", median(seconds), memory, 0)
        )


class _Job:
    """One rank of a job. The methods are its phases."""

    def __init__(self, store: Any, path: Path) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store, self.path = store, path
        self.data, cut = torch.full((2, 4), float(self.rank)), (0, self.rank, self.size)
        self.state = {"w": ShardedTensor.from_rank_offsets("w", self.data, cut)}

    def start(self) -> None:
        rank, size = self.rank, self.size
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=size)

    def groups(self) -> None:
        self.made = ProcessGroups.from_sizes(tp=2, cp=2, pp=2)

    def agreed_error(self) -> None:
        with suppress(ValueError):
            failed: list[Exception] = [ValueError("lost")] if self.rank == 1 else []
            world: Any = dist.group.WORLD
            agreement.max_or_raise((), failed, world)
            raise RuntimeError("rank 1's error is not raised here")

    def report(self) -> None:
        detector = StragglerDetector()
        detector.configure(self.size, self.rank, enabled=True, controller=False)
        with detector:
            pass
        if detector.report(1.0, 1) != (self.rank == 0):
            raise RuntimeError("the first rank has no report")

    def save(self) -> None:
        save_sharded_state_dict(self.state, self.path)

    def load(self) -> None:
        self.data.zero_()
        load_sharded_state_dict(self.state, self.path)
        if not (self.data == self.rank).all():
            raise RuntimeError("a rank loaded other values than it saved")

    def exit(self) -> None:
        self.made.destroy()
        StragglerDetector.reset_singleton()
        dist.destroy_process_group()


def _be_a_rank(port: int, folder: str, cycles: int) -> list[dict[str, tuple[float, int]]]:
    """Return the seconds and the memory of each phase, by cycle."""
    rank = int(os.environ["RANK"])
    stores: Any = dist  # torch does not export them
    store = stores.TCPStore("127.0.0.1", port)
    before, memory, measured = _count_held(), _read_private_memory(), []
    for cycle in range(cycles):
        job, phases = _Job(stores.PrefixStore(str(cycle), store), Path(folder, str(cycle))), {}
        for phase in _PHASES:
            began = time.perf_counter()
            getattr(job, phase)()
            if dist.is_initialized():
                dist.barrier()
            phases[phase] = time.perf_counter() - began, max(0, _read_private_memory() - memory)
        measured.append(phases)
        deadline = time.monotonic() + _PATIENCE_S
        while any(now > then for now, then in zip(_count_held(), before, strict=True)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_count_held()} threads and files, {before} before")
            time.sleep(0.01)
        keys = store.list_keys() if rank == 0 else []
        # Other ranks may have begun the next cycle.
        if left := [one for one in keys if one.startswith(f"{cycle}/") and "//cpu//" not in one]:
            raise RuntimeError(f"a cycle leaves keys in the store: {left}")
    return measured


def _count_held() -> tuple[int, int]:
    """Return the numbers of threads and of open files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _read_private_memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private"))
