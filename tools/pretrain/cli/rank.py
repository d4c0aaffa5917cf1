"""One rank: its device, its process group, and its exit after a failure."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
import traceback
import uuid
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mcore.parallel.checkpoint import CheckpointingException
from mcore.tensor import current_device
from pretrain.cli.claim import check_seen_by_all, claim, still_ours
from pretrain.cli.ending import Ending
from pretrain.cli.options import Request
from pretrain.run.checkpoints import describe_latest, latest_step
from pretrain.run.loop import DivergedError, RunFolderError, StoppedBySignal
from pretrain.run.saving import ReplicasDifferError
from pretrain.run.training import train
from pretrain.run_folder import RunFolder, free_number, make_run_folder, name_run
from pretrain.usage import EXIT_DIVERGED, EXIT_FOLDER, EXIT_USAGE, UsageError
from pretrain.watch.logs import is_writer
from pretrain.watch.mlflow_run import JobRun, warn_like_the_job
from pretrain.watch.mlflow_target import choose_target

_EXIT_FAILED = 1
_MEET_EVERY_S = 0.02
_WAIT_FOR_CULPRIT_S = 2.0
_CONNECTION_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe")


def run_rank(request: Request) -> NoReturn:
    """Train as the rank in the launcher's environment variables, and end the process."""
    exit_code = _run(request)
    sys.stdout.flush()
    sys.stderr.flush()
    # An exception may still refer to a process group, whose threads abort an orderly exit.
    os._exit(exit_code)


def _run(request: Request) -> int:
    ending = Ending(request.settings.grace_s)
    device = _choose_device()
    torch.set_num_threads(_count_threads())
    _join(device, datetime.timedelta(seconds=request.settings.timeout_s))
    _report_another_layout(request)
    try:
        folder = _agree_on_folder(request, device)
        mlflow = _open_mlflow(request, folder, ending)
        with mlflow or contextlib.nullcontext():
            train(
                request.settings,
                folder,
                device,
                resume=request.resume,
                past_damage=request.by_itself,
                mlflow=mlflow,
                signal=lambda: ending.requested,
            )
        # A rank that hangs after the others have left would block the launcher without end.
        dist.barrier()
    except StoppedBySignal as stopped:
        return int(str(stopped.code))
    except DivergedError as error:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                folder.diverged.write_text(f"{error}\n")
        return _refuse(DivergedError(f"{error}. {describe_latest(folder)}"), EXIT_DIVERGED)
    except RunFolderError as error:
        more = "" if folder.is_gone() else f". {describe_latest(folder)}"
        return _refuse(RunFolderError(f"{error}{more}"), EXIT_FOLDER)
    except UsageError as error:
        return _refuse(error, EXIT_USAGE)
    except (CheckpointingException, ReplicasDifferError) as error:
        return _refuse(error, _EXIT_FAILED)
    except Exception as error:
        _leave_after(error)
    dist.destroy_process_group()
    return 0


def _join(device: torch.device, timeout: datetime.timedelta) -> None:
    """Create the process group of all ranks.

    After a restart, torchrun's store still contains the addresses of the previous ranks, so each
    start uses a separate prefix.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = _agree_on_name(store, rank, world_size, timeout.total_seconds())
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


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


def _report_another_layout(request: Request) -> None:
    if request.stored_layout and dist.get_rank() == 0:
        line = (
            f"pretrain: continuing with the layout {request.settings.layout} instead of "
            f"{request.stored_layout}, with new random streams"
        )
        print(line, file=sys.stderr, flush=True)


def _open_mlflow(request: Request, folder: RunFolder, ending: Ending) -> JobRun | None:
    """Start opening the MLflow run (takes seconds) on the rank that writes logs."""
    if not (request.settings.mlflow and is_writer()):
        return None
    target = choose_target(folder, request.mlflow_uri)
    first_step = latest_step(folder) if request.resume is not None else 0
    warn_like_the_job()
    job = JobRun(request.settings, folder, target, first_step, still_ours(folder.path))
    ending.last_call = lambda: job.end("KILLED")
    return job


def _refuse(error: Exception, exit_code: int) -> int:
    """Report once the error that all ranks have raised. The other ranks wait for the report."""
    try:
        dist.barrier()  # print earlier logs of all ranks first
        if dist.get_rank() == 0:
            print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        dist.barrier()
    except RuntimeError:
        _leave_after(error)  # a rank has died
    return exit_code


def _leave_after(error: Exception) -> None:
    """Print the error and end the process, without waiting for ranks that may be dead."""
    words = "" if isinstance(error, OSError) else str(error).lower()  # an OSError is local
    lost_peer = any(sign in words for sign in _CONNECTION_WORDS)
    if lost_peer:
        # Gives the launcher time to see the peer that failed first.
        time.sleep(_WAIT_FOR_CULPRIT_S)
        print(f"pretrain: rank {dist.get_rank()} lost its peer", file=sys.stderr, flush=True)
    else:
        text = "".join(traceback.format_exception(error))
        print(f"pretrain: rank {dist.get_rank()} failed:\n{text}", file=sys.stderr, flush=True)
    os._exit(_EXIT_FAILED)


def _choose_device() -> torch.device:
    if torch.accelerator.is_available():
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if index >= count:
            raise UsageError(
                f"rank {os.environ['RANK']} is number {index} on its machine, which has "
                f"{count} accelerators: start fewer ranks on that machine"
            )
        torch.accelerator.set_device_index(index)
    return current_device()


def _count_threads() -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (os.cpu_count() or 1) // local_ranks)


def _agree_on_folder(request: Request, device: torch.device) -> RunFolder:
    """The run's folder, equal on all ranks. Rank 0 names and creates a new folder."""
    if request.resume is not None:
        check_seen_by_all(request.resume, device)
        return RunFolder(request.resume)
    layout = request.settings.run_kind
    facts = torch.zeros(3, dtype=torch.int64, device=device)
    problem: UsageError | None = None
    if dist.get_rank() == 0:
        started = int(time.time())
        number = free_number(request.runs_dir, layout, started)
        try:
            named = request.run_dir or name_run(request.runs_dir, layout, started, number)
            request.claims.append(claim(make_run_folder(named).path))
        except UsageError as error:
            problem = error
        facts.copy_(torch.tensor([started, number, int(problem is not None)]))
    dist.broadcast(facts, src=0)
    started, number, failed = facts.tolist()
    path = request.run_dir or name_run(request.runs_dir, layout, started, number)
    if failed:
        raise problem or UsageError(f"rank 0 could not make the run folder {path}")
    check_seen_by_all(path, device)
    return RunFolder(path)
