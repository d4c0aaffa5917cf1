"""Starts the ranks on this machine and reports the rank that failed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pretrain.cli.ending import is_under_nohup
from pretrain.cli.handshake import LAUNCHER, PRIVATE_FOLDER
from pretrain.cli.options import Request
from pretrain.run.checkpoints import describe_latest
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.usage import EXIT_DIVERGED, EXIT_FOLDER, EXIT_USAGE

_STARTER = "PRETRAIN_STARTER"  # the process that this one must not outlive
_LOOK_EVERY_S = 0.5
_RARELY_S = 86_400
_GRACE_AFTER_S = 5.0  # for the last call of a rank that could not save in time


def launch(argv: list[str], request: Request, folder: RunFolder) -> int:
    """Run this program once per rank through ``torch.distributed.run`` and wait for all ranks.

    Returns the exit code: 0, 2 for a refused request, 4 after a divergence, 5 for a lost run
    folder, 128 + the signal that stopped the run, else 1.
    """
    for name in ("", ".agent.server.api"):  # this logger has a separate level
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    if starter := os.environ.pop(_STARTER, ""):
        threading.Thread(target=_end_after, args=(int(starter),), daemon=True).start()
    is_named = request.resume is not None or request.run_dir is not None
    arguments = argv if is_named else [*argv, "--run-dir", str(folder.path)]
    try:
        with _stay_on_this_machine() as private:
            config = _make_launch_config(request.settings, private)
            elastic_launch(config, sys.executable)("-m", "pretrain", *arguments)
    except ChildFailedError as failed:
        # After the first rank has ended, the launcher may kill the others before they exit.
        codes = {failure.exitcode for failure in failed.failures.values()}
        for agreed in (EXIT_USAGE, EXIT_DIVERGED, EXIT_FOLDER):
            if agreed in codes:
                return agreed
        rank, failure = _find_culprit(failed)
        code = _read_exit_code(failure)
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        _report(
            f"rank {rank} {killed or f'failed with exit code {code}'}; all ranks ended.", folder
        )
        return 1
    except (SignalException, KeyboardInterrupt) as stopped:
        number: signal.Signals = getattr(stopped, "sigval", signal.SIGINT)
        _report(f"interrupted by {number.name}; all ranks ended.", folder)
        return 128 + number
    return 0


def _end_after(starter: int) -> None:
    """Send SIGTERM to this process when the process that started it has ended."""
    while os.getppid() == starter:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _stay_on_this_machine() -> Iterator[Path]:
    """A private folder for the stores. Inside, ranks inherit loopback as their only interface.

    Nothing listens for a store: whoever can write to one runs code in its readers, which unpickle
    its values.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with tempfile.TemporaryDirectory(prefix="pretrain-", ignore_cleanup_errors=True) as private:
        variables = {
            PRIVATE_FOLDER: private, LAUNCHER: str(os.getpid()),
            "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        os.environ |= variables
        try:
            yield Path(private)
        finally:
            for name in variables:
                del os.environ[name]


def _make_launch_config(settings: Settings, private: Path) -> LaunchConfig:
    wait_s = math.ceil(settings.grace_s + _GRACE_AFTER_S)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=settings.world_size, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint=str(private / "launcher"), local_addr="127.0.0.1",
        # The file grows with each sign of life, which the only node does not need.
        rdzv_configs={"store_type": "file", "keep_alive_interval": _RARELY_S},
        logs_specs=DefaultLogsSpecs(str(private / "logs")), max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    if is_under_nohup():
        config.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    if hasattr(config, "shutdown_timeout"):
        config.shutdown_timeout = wait_s
    else:  # torch 2.11 has no option: this default is its waiting time
        PContext.close.__defaults__ = (None, wait_s)
    return config


def _find_culprit(failed: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first: killed ranks before others, ranks ended by the launcher last."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, float]:
        _, failure = item
        code = _read_exit_code(failure)
        return (code == -signal.SIGTERM, code >= 0, failure.timestamp)

    return min(failed.failures.items(), key=order)


def _read_exit_code(failure: ProcessFailure) -> int:
    """The exit code, with 128 + SIGTERM read as SIGTERM: the rank ended after its last call."""
    code: int = failure.exitcode
    return -signal.SIGTERM if code == 128 + signal.SIGTERM else code


def _report(event: str, folder: RunFolder) -> None:
    print(f"pretrain: {event} {describe_latest(folder)}", file=sys.stderr, flush=True)
    # A rank that was stopped while drawing a progress bar leaves the cursor in its line.
    if os.isatty(2):
        sys.stderr.write("\n")
