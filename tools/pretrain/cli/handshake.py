"""The agreements of the ranks at a start: their process group and their run folder."""

from __future__ import annotations

import datetime
import os
import socket
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pretrain.cli.claim import claim
from pretrain.cli.options import Request
from pretrain.corpus import run_on_all
from pretrain.run_folder import LOCK_NAME, RunFolder, free_number, make_run_folder, name_run
from pretrain.usage import UsageError

PRIVATE_FOLDER = "PRETRAIN_PRIVATE_FOLDER"  # holds the store of ranks on one machine
LAUNCHER = "PRETRAIN_LAUNCHER"  # the process that made it
_MEET_EVERY_S = 0.02
_SEEN_WITHIN_S = 10.0  # network file systems show new files late


def join(device: torch.device, timeout: datetime.timedelta) -> None:
    """Create the process group of all ranks.

    After a restart, torchrun's store still contains the addresses of the previous ranks, so each
    start uses a separate prefix.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = os.environ.pop(PRIVATE_FOLDER, None)  # not inherited by child processes
    path = folder and os.path.join(folder, "ranks")
    store = FileStore(path) if path else next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    name = _agree_on_name(store, rank, world_size, timeout.total_seconds())
    dist.init_process_group(
        dist.get_default_backend_for_device(device), store=PrefixStore(name, store), rank=rank,
        world_size=world_size, timeout=timeout, device_id=None if device.type == "cpu" else device,
    )  # fmt: skip


def _agree_on_name(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Agree on a new name for this start: torchrun's restart count differs between nodes.

    Rank 0 draws the name and answers every rank that writes hello, dead ranks of earlier starts
    too, until each rank of this start has the name.
    """
    token = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", token)
        name = str(store.get(f"name/{token}").decode())
        store.set(f"{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout_s
    missing = set(range(1, world_size))
    while missing and time.monotonic() < deadline:
        for other in sorted(missing):
            if store.check([f"{token}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"name/{store.get(f'hello/{other}').decode()}", token)
        time.sleep(_MEET_EVERY_S)
    if missing:
        raise TimeoutError(f"ranks {sorted(missing)} did not start within {timeout_s:g} s")
    return token


def agree_on_folder(request: Request, device: torch.device) -> RunFolder:
    """The run's folder, equal on all ranks. Rank 0 names and creates a new folder."""
    path = request.resume or request.run_dir
    if path is None:
        kind, started = request.settings.run_kind, int(time.time())
        name = torch.tensor([started, free_number(request.runs_dir, kind, started)], device=device)
        dist.broadcast(name, src=0)
        path = name_run(request.runs_dir, kind, *name.tolist())

    def make() -> None:
        if request.resume is None and dist.get_rank() == 0:
            folder = make_run_folder(path, trusted=request.trust_run)
            request.claims.append(claim(folder.path))

    run_on_all(make, dist.group.WORLD)  # type: ignore[arg-type]
    check_seen_by_all(path, device)
    return RunFolder(path)


def check_seen_by_all(folder: Path, device: torch.device) -> None:
    """Raise UsageError on all ranks if a rank does not see the folder that rank 0 has claimed."""
    path = folder / LOCK_NAME
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    rank = dist.get_rank()
    lowest = torch.tensor(dist.get_world_size() if path.exists() else rank, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    blind = int(lowest.item())
    if blind == dist.get_world_size():
        return
    place = [socket.gethostname(), str(folder.absolute())]
    dist.broadcast_object_list(place, src=blind, device=device)
    raise UsageError(
        f"rank {blind} on {place[0]} does not see the run folder {place[1]}: pass a folder that "
        "all nodes share with --run-dir or --runs-dir"
    )
