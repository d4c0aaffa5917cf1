"""The processes that ranks are made from, forked on the CPU and spawned for an accelerator."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

# Imported once by the fork server and inherited by every rank. None of them starts a thread or
# touches an accelerator, which a forked rank could not use any more.
_TORCH = ("torch", "torch.distributed")
_PRELOADED = (
    "torch.distributed.tensor",
    # Optimizers, activation checkpoints and DTensors import it on first use, in seconds.
    "torch._dynamo",
    "pytest",
    "rank_testing.child",
)
# Slow to import, and worth it only where the test process uses them.
_PRELOADED_IF_USED = (
    "hypothesis",
    "numpy",
    "torch.distributed.checkpoint",
)
_preloaded_for_tests: list[str] = []
_CPU_NAMES = frozenset({"cpu", "fake", "gloo", "mpi", "ucc"})

_starting = threading.Lock()


def preload(*modules: str) -> None:
    """Have the fork server import ``modules``, each where it is installed, for all ranks.

    Call it while a test file is imported: a server that runs already does not import them. Name
    what starts no thread of Python, needs seconds, and does not read the environment on import.
    """
    _preloaded_for_tests.extend(name for name in modules if name not in _preloaded_for_tests)


def start_context(init: str | None) -> ForkServerContext | SpawnContext:
    """Return the context whose processes become ranks, with its fork server started.

    Ranks on the CPU come from a fork server that has torch loaded; it ends with the test process.
    Ranks that use an accelerator are spawned, since nothing of its state survives a fork.
    """
    if uses_accelerator(init):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    used = [name for name in _PRELOADED_IF_USED if name in sys.modules]
    context.set_forkserver_preload([*modules_for_scripts(), *_PRELOADED, *used])
    with _starting, _variables(server_environment()):
        forkserver.ensure_running()
    return context


def modules_for_scripts() -> list[str]:
    """Return what every process that is forked for a test finds imported."""
    return [*_TORCH, *_preloaded_for_tests]


def server_environment() -> dict[str, str]:
    """Return what a server needs besides this process's variables; its children do not keep it."""
    # Numerical libraries start their threads on import: a process that forks may have no second
    # one. The server of Python 3.10 and 3.11 does not take over the path of the test process.
    folder = str(Path(__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONPATH": folder if not path else os.pathsep.join((folder, path)),
    }


def variables_of_the_test() -> dict[str, str]:
    """Return this process's variables, without those that a server gets in another thread."""
    with _starting:
        return dict(os.environ)


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


def uses_accelerator(init: str | None) -> bool:
    """Return whether ranks use an accelerator whose group is initialised with ``init``."""
    if init is None:
        return False
    return any(part.split(":")[0] not in _CPU_NAMES for part in init.split(","))
