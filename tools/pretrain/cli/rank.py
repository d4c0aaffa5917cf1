"""One rank: its device, its process group, and how it leaves when something fails."""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import CheckpointingException
from mcore.tensor import current_device
from pretrain.cli.options import Request
from pretrain.run.checkpoints import latest_step
from pretrain.run.saving import ReplicasDifferError
from pretrain.run.training import train
from pretrain.run_folder import RunFolder, free_number, make_run_folder, name_run
from pretrain.usage import EXIT_USAGE, UsageError
from pretrain.watch.logs import is_writer
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.mlflow_target import choose_target

_EXIT_FAILED = 1
_WAIT_FOR_CULPRIT_S = 2.0
_LAST_CALL_S = 2.5  # the launcher ends ranks for good after 3 s
_CONNECTION_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe")


def run_rank(request: Request) -> NoReturn:
    """Train as the rank that the launcher's environment names, and end the process."""
    exit_code = _run(request)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a process group that an exception still refers to abort an orderly exit.
    os._exit(exit_code)


def _run(request: Request) -> int:
    # The launcher ends the ranks. Python's own handlers would wait for a collective to return.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _write_whole_lines()
    device = _device()
    torch.set_num_threads(_threads())
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=datetime.timedelta(seconds=request.settings.timeout_s),
    )
    _report_another_layout(request)
    try:
        folder = _agree_on_folder(request, device)
        mlflow = _open_mlflow(request, folder)
        with mlflow or contextlib.nullcontext():
            train(request.settings, folder, device, resume=request.resume, mlflow=mlflow)
    except UsageError as error:
        return _refuse(error, EXIT_USAGE)
    except (CheckpointingException, ReplicasDifferError) as error:
        return _refuse(error, _EXIT_FAILED)
    except Exception as error:
        _leave_after(error)
    dist.destroy_process_group()
    return 0


def _report_another_layout(request: Request) -> None:
    if request.stored_layout and dist.get_rank() == 0:
        line = (
            f"pretrain: continuing as {request.settings.layout} what ran as "
            f"{request.stored_layout}, with new random streams"
        )
        print(line, file=sys.stderr, flush=True)


def _open_mlflow(request: Request, folder: RunFolder) -> JobRun | None:
    """On the rank that writes logs, start opening the MLflow run, which takes seconds."""
    if not (request.settings.mlflow and is_writer()):
        return None
    target = choose_target(folder, request.mlflow_uri)
    job = JobRun(
        request.settings, folder, target, latest_step(folder) if request.resume is not None else 0
    )
    _call_before_a_signal_ends_us(lambda: job.end("KILLED"))
    return job


def _write_whole_lines() -> None:
    """Write each line at once: unbuffered output writes its end separately, after other ranks'."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


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
    lost_peer = any(words in str(error).lower() for words in _CONNECTION_WORDS)
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
        return RunFolder(request.resume)
    layout = request.settings.run_kind
    facts = torch.zeros(3, dtype=torch.int64, device=device)
    problem: UsageError | None = None
    if dist.get_rank() == 0:
        started = int(time.time())
        number = free_number(request.runs_dir, layout, started)
        try:
            make_run_folder(request.run_dir or name_run(request.runs_dir, layout, started, number))
        except UsageError as error:
            problem = error
        facts.copy_(torch.tensor([started, number, int(problem is not None)]))
    dist.broadcast(facts, src=0)
    started, number, failed = facts.tolist()
    path = request.run_dir or name_run(request.runs_dir, layout, started, number)
    if failed:
        raise problem or UsageError(f"rank 0 could not make the run folder {path}")
    return RunFolder(path)


def _call_before_a_signal_ends_us(action: Callable[[], None]) -> None:
    """Have SIGINT and SIGTERM end this process with 128 + signal, after an action of seconds.

    Python's own handlers would wait for the main thread, which may be in a collective.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_it_to_the_thread)
    threading.Thread(target=_end, args=(reading, action), name="last call", daemon=True).start()


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: because there is a handler, Python writes the number to the pipe."""


def _end(reading: int, action: Callable[[], None]) -> None:
    number = os.read(reading, 1)[0]
    logging.disable()  # what fails from here on fails because the process ends
    worker = threading.Thread(target=action, daemon=True)
    worker.start()
    worker.join(_LAST_CALL_S)
    os._exit(128 + number)
