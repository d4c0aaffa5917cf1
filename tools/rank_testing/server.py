"""The processes that ranks are made from."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from rank_testing.devices import uses_accelerator

# Imported once by the fork server and inherited by every rank. None of them starts a thread or
# touches an accelerator, which a forked rank could not use any more.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    # Optimizers, activation checkpoints and DTensors import it on first use, in seconds.
    "torch._dynamo",
    "pytest",
    "rank_testing.child",
    "rank_testing.group",
)
# Slow to import, and worth it only where the test process has use for them.
_PRELOADED_IF_USED = (
    "hypothesis",
    "numpy",
    "torch.distributed.checkpoint",
)

_starting = threading.Lock()


def start_context(init: str | None) -> ForkServerContext | SpawnContext:
    """Return the context whose processes become ranks, with its fork server started.

    Ranks on the CPU come from a fork server that has torch loaded; it ends with the test process.
    Ranks that use an accelerator are spawned, since nothing of its state survives a fork.

    Args:
        init: what the ranks hand to `init_process_group`; None for no group.

    Example:
        >>> start_context("cuda:nccl").get_start_method()
        'spawn'
    """
    if uses_accelerator(init):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    used = [name for name in _PRELOADED_IF_USED if name in sys.modules]
    context.set_forkserver_preload([*_PRELOADED, *used])
    with _starting, _variables(_server_environment()):
        forkserver.ensure_running()
    return context


def _server_environment() -> dict[str, str]:
    """Return what the server needs besides this process's variables; ranks do not keep it.

    One thread for the numerical libraries, which start theirs on import: a process that forks may
    have no second one. The folder of this package, since the server of Python 3.10 and 3.11 does
    not take over the path of the test process.
    """
    folder = str(Path(__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": folder if not path else os.pathsep.join((folder, path)),
    }


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
