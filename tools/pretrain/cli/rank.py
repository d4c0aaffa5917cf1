"""One rank: its device, its process group, and how it leaves when something fails."""

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
    """Train as the rank that the launcher's environment names, and end the process."""
    exit_code = _run(request)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a process group that an exception still refers to abort an orderly exit.
    os._exit(exit_code)


def _run(request: Request) -> int:
    ending = Ending(request.settings.grace_s)
    device = _device()
    torch.set_num_threads(_threads())
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
        dist.barrier()  # a launcher waits for ever for a rank that hangs while the others have left
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
    """Make the process group of all ranks.

    torchrun restarts ranks beside the store of those before, with their addresses still in it.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    name = _name_of_this_start(store, rank, world_size, timeout.total_seconds())
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _name_of_this_start(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """What no earlier start was called; torchrun's count of restarts differs between nodes.

    Rank 0 answers every rank that says hello, dead ones of earlier starts too, until each has
    got its answer.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", own)
        name = str(store.get(f"name/{own}").decode())
        store.set(f"{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout_s
    missing = set(range(1, world_size))
    while missing and time.monotonic() < deadline:
        for other in sorted(missing):
            if store.check([f"{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"name/{store.get(f'hello/{other}').decode()}", own)
        time.sleep(_MEET_EVERY_S)
    if missing:
        raise TimeoutError(f"ranks {sorted(missing)} have not come within {timeout_s:g} s")
    return own


def _report_another_layout(request: Request) -> None:
    if request.stored_layout and dist.get_rank() == 0:
        line = (
            f"pretrain: continuing as {request.settings.layout} what ran as "
            f"{request.stored_layout}, with new random streams"
        )
        print(line, file=sys.stderr, flush=True)


def _open_mlflow(request: Request, folder: RunFolder, ending: Ending) -> JobRun | None:
    """On the rank that writes logs, start opening the MLflow run, which takes seconds."""
    if not (request.settings.mlflow and is_writer()):
        return None
    target = choose_target(folder, request.mlflow_uri)
    first_step = latest_step(folder) if request.resume is not None else 0
    warn_like_the_job()
    job = JobRun(request.settings, folder, target, first_step, still_ours(folder.path))
    ending.last_call = lambda: job.end("KILLED")
    return job


def _refuse(error: Exception, exit_code: int) -> int:
    """Report once what all ranks have raised; the others wait until it is reported."""
    try:
        dist.barrier()  # what ranks have logged before comes first
        if dist.get_rank() == 0:
            print(f"pretrain: error: {error}", file=sys.stderr, flush=True)
        dist.barrier()
    except RuntimeError:
        _leave_after(error)  # the error is that a rank has died
    return exit_code


def _leave_after(error: Exception) -> None:
    """Print what happened and end the process, without waiting for ranks that may be gone."""
    words = "" if isinstance(error, OSError) else str(error).lower()  # which is this rank's own
    lost_peer = any(told in words for told in _CONNECTION_WORDS)
    if lost_peer:
        # Whoever watches the ranks should see the peer that failed first.
        time.sleep(_WAIT_FOR_CULPRIT_S)
        print(f"pretrain: rank {dist.get_rank()} lost its peer", file=sys.stderr, flush=True)
    else:
        text = "".join(traceback.format_exception(error))
        print(f"pretrain: rank {dist.get_rank()} failed:\n{text}", file=sys.stderr, flush=True)
    os._exit(_EXIT_FAILED)


def _device() -> torch.device:
    if torch.accelerator.is_available():
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if index >= count:
            raise UsageError(
                f"rank {os.environ['RANK']} is number {index} on its machine, which has "
                f"{count} accelerators: start fewer ranks there"
            )
        torch.accelerator.set_device_index(index)
    return current_device()


def _threads() -> int:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (os.cpu_count() or 1) // local_ranks)


def _agree_on_folder(request: Request, device: torch.device) -> RunFolder:
    """The run's folder, equal on all ranks; rank 0 names and makes it unless it exists already."""
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
