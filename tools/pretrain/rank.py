"""One rank of the job, from its device to its exit code."""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from mcore.observe import status_of
from mcore.parallel import logical_and_across_model_parallel_group
from mcore.tensor import current_device
from pretrain.cli.claim import is_of_this_launcher, still_ours
from pretrain.cli.ending import Ending, end_after
from pretrain.cli.handshake import agree_on_folder, join
from pretrain.cli.options import Request
from pretrain.run.checkpoints import latest_step
from pretrain.run.training import train
from pretrain.run_folder import RunFolder
from pretrain.threads import choose_threads
from pretrain.usage import UsageError
from pretrain.watch.logs import is_writer
from pretrain.watch.mlflow_run import JobRun, warn_like_the_job
from pretrain.watch.mlflow_target import choose_target, report_trust


def run_rank(request: Request) -> NoReturn:
    """Train as the rank in the launcher's environment variables, and end the process."""
    exit_code = _train_and_report(request)
    sys.stdout.flush()
    sys.stderr.flush()
    # An exception may still refer to a process group, whose threads abort an orderly exit.
    os._exit(exit_code)


def _train_and_report(request: Request) -> int:
    settings = request.settings
    ending = Ending(settings.grace_s)
    if request.device:
        import standin

        standin.switch_on()
    device = _choose_device()
    torch.set_num_threads(choose_threads()[0])
    join(device, datetime.timedelta(seconds=settings.timeout_s))
    folder = mlflow = None
    try:
        folder = agree_on_folder(request, device)
        # A restart by torchrun repeats the command, but not what config.json says that it did.
        is_first = settings.reset_data and logical_and_across_model_parallel_group(
            not is_of_this_launcher(folder.path, "config.json"), dist.group.WORLD
        )
        settings = dataclasses.replace(settings, reset_data=is_first)
        mlflow = _open_mlflow(request, folder, ending)
        train(
            settings, folder, device, resume=request.resume, past_damage=request.by_itself,
            mlflow=mlflow, signal=lambda: ending.requested,
        )  # fmt: skip
        # A rank that hangs after the others have left would block the launcher without end.
        dist.barrier()
    except (Exception, SystemExit) as error:
        if mlflow is not None:
            mlflow.end(status_of(error))
        return end_after(error, folder)
    dist.destroy_process_group()
    return 0


def _choose_device() -> torch.device:
    if torch.accelerator.is_available():
        count = torch.accelerator.device_count()
        # Launchers may show each process only its device.
        index = 0 if count == 1 else int(os.environ.get("LOCAL_RANK", "0"))
        if index >= count:
            raise UsageError(
                f"rank {os.environ['RANK']} is number {index} on its machine, which has "
                f"{count} accelerators: start fewer ranks on that machine"
            )
        torch.accelerator.set_device_index(index)
    return current_device()


def _open_mlflow(request: Request, folder: RunFolder, ending: Ending) -> JobRun | None:
    """Start opening the MLflow run (takes seconds) on the rank that writes logs."""
    if not (request.settings.mlflow and is_writer()):
        return None
    target = choose_target(folder, request.mlflow_uri, trusted=request.trust_run)
    report_trust(target)
    first_step = latest_step(folder) if request.resume is not None else 0
    warn_like_the_job()
    job = JobRun(request.settings, folder, target, first_step, still_ours(folder.path))
    ending.last_call = lambda: job.end("KILLED")
    return job
