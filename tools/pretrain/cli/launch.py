"""The start of the ranks on this machine, and the line that says which of them failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pretrain.cli.options import Request
from pretrain.run.checkpoints import describe_latest
from pretrain.run_folder import RunFolder
from pretrain.usage import EXIT_USAGE

EXIT_INTERRUPTED = 130


def launch(argv: list[str], request: Request, folder: RunFolder) -> int:
    """Run this program once per rank through ``torch.distributed.run`` and wait for all of them.

    Returns the exit code: 0, 2 for a refused request, 130 after Ctrl-C, else 1.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = list(argv)
    if request.resume is None and request.run_dir is None:
        arguments += ["--run-dir", str(folder.path)]
    ranks = elastic_launch(_launch_config(request.settings.world_size), sys.executable)
    try:
        ranks("-m", "pretrain", *arguments)
    except ChildFailedError as failed:
        # Once a rank has ended, the launcher may kill the others before they end by themselves.
        if any(failure.exitcode == EXIT_USAGE for failure in failed.failures.values()):
            return EXIT_USAGE
        rank, failure = _culprit(failed)
        _say(f"rank {rank} {_how(_exit_code(failure))}; all ranks ended.", folder)
        return 1
    except (SignalException, KeyboardInterrupt) as stopped:
        name = getattr(getattr(stopped, "sigval", signal.SIGINT), "name", "SIGINT")
        _say(f"interrupted by {name}; all ranks ended.", folder)
        return EXIT_INTERRUPTED
    return 0


def _launch_config(num_ranks: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=3,
    )


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
