"""The start of the ranks on this machine, and the line that says which of them failed."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pretrain.cli.ending import is_under_nohup
from pretrain.cli.options import Request
from pretrain.run.checkpoints import describe_latest
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.usage import EXIT_DIVERGED, EXIT_FOLDER, EXIT_USAGE

_GRACE_AFTER_S = 5.0  # for the last call of a rank that could not save in time


def launch(argv: list[str], request: Request, folder: RunFolder) -> int:
    """Run this program once per rank through ``torch.distributed.run`` and wait for all of them.

    Returns the exit code: 0, 2 for a refused request, 4 for a run that diverges, 5 for a run
    folder that is lost, 128 + a signal that stopped it, else 1.
    """
    for name in ("", ".agent.server.api"):  # which has a level of its own
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    arguments = list(argv)
    if request.resume is None and request.run_dir is None:
        arguments += ["--run-dir", str(folder.path)]
    ranks = elastic_launch(_launch_config(request.settings), sys.executable)
    try:
        ranks("-m", "pretrain", *arguments)
    except ChildFailedError as failed:
        # Once a rank has ended, the launcher may kill the others before they end by themselves.
        codes = {failure.exitcode for failure in failed.failures.values()}
        for told in (EXIT_USAGE, EXIT_DIVERGED, EXIT_FOLDER):
            if told in codes:
                return told
        rank, failure = _culprit(failed)
        _say(f"rank {rank} {_how(_exit_code(failure))}; all ranks ended.", folder)
        return 1
    except (SignalException, KeyboardInterrupt) as stopped:
        number: signal.Signals = getattr(stopped, "sigval", signal.SIGINT)
        _say(f"interrupted by {number.name}; all ranks ended.", folder)
        return 128 + number
    return 0


def _launch_config(settings: Settings) -> LaunchConfig:
    wait_s = math.ceil(settings.grace_s + _GRACE_AFTER_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    if is_under_nohup():
        config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    if hasattr(config, "shutdown_timeout"):
        config.shutdown_timeout = wait_s
    else:  # torch 2.11 waits as long as this default says
        PContext.close.__defaults__ = (None, wait_s)
    return config


def _culprit(failed: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed by itself: killed ones first, those the launcher has ended last."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, float]:
        _, failure = item
        code = _exit_code(failure)
        return (code == -signal.SIGTERM, code >= 0, failure.timestamp)

    return min(failed.failures.items(), key=order)


def _exit_code(failure: ProcessFailure) -> int:
    """As if SIGTERM had ended a rank that ended itself because of it, after its last call."""
    code: int = failure.exitcode
    return -signal.SIGTERM if code == 128 + signal.SIGTERM else code


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"failed with exit code {exitcode}"


def _say(what: str, folder: RunFolder) -> None:
    print(f"pretrain: {what} {describe_latest(folder)}", file=sys.stderr, flush=True)
    # Ranks that were stopped while drawing a progress bar leave the cursor in its line.
    if os.isatty(2):
        sys.stderr.write("\n")
