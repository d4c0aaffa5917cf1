"""The fork server of scripts and of ranks on the CPU. Ranks for an accelerator are spawned."""

import contextlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from unittest import mock

# Imported once by the fork server and inherited by every rank. None of them starts a thread or
# touches an accelerator, which a forked rank could not use any more.
_FIRST = ("rank_testing.quick_imports", "torch", "torch.distributed")
_PRELOADED = (
    "torch.distributed.tensor",
    # Optimizers, activation checkpoints and DTensors import it on first use, in seconds.
    "torch._dynamo",
    "pytest",
    "rank_testing.child",
)
# Slow to import, and worth it only if the test process uses them.
_PRELOADED_IF_USED = ("hypothesis", "numpy", "torch.distributed.checkpoint")
_preloaded_for_tests: list[str] = []
_CPU_NAMES = frozenset({"cpu", "fake", "gloo", "mpi", "standin", "ucc"})
# The part that starts scripts leaves first. A script is executed at the top level of the program,
# so its process ends like that of any interpreter: with sys.excepthook, atexit and the teardown.
_PROGRAM = """import sys
from rank_testing.scripts import fork_server
code = fork_server({}, {!r})
if code is None: {}
exec(code)"""
_spawn: Callable[..., int] = util.spawnv_passfds
_scripts: tuple[int, socket.socket] | None = None  # the process it serves, and the socket to it


def preload(*modules: str) -> None:
    """Make the fork server import ``modules`` for all ranks, each if it is installed.

    Call it while a test file is imported: a running server imports nothing more. Name modules that
    take seconds to import, start no Python thread and do not read the environment on import.
    """
    _preloaded_for_tests.extend(name for name in modules if name not in _preloaded_for_tests)


def start_context(init: str | None) -> ForkServerContext | SpawnContext:
    """Return the context whose processes become ranks, with its fork server started.

    Ranks on the CPU are forked from a server that has torch loaded. It ends with the test process.
    Ranks that use an accelerator are spawned, since its state does not survive a fork.
    """
    if uses_accelerator(init):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    used = [name for name in _PRELOADED_IF_USED if name in sys.modules]
    context.set_forkserver_preload([*_PRELOADED, *used])
    begin = mock.patch.object(util, "spawnv_passfds", _spawn_with_scripts)
    with _set_variables(_make_server_environment()), begin:
        forkserver.ensure_running()
    return context


def connect_scripts() -> socket.socket:
    """Return the socket to the part of the fork server that starts scripts."""
    if _scripts is None or _scripts[0] != os.getpid():
        start_context(None)
    if _scripts is None:
        raise RuntimeError("this process has a fork server already, which starts no scripts")
    return _scripts[1]


def _spawn_with_scripts(path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
    global _scripts
    *flags, program = arguments
    if "multiprocessing.forkserver" not in program:
        return _spawn(path, arguments, files)
    ours, theirs = socket.socketpair()
    _scripts = os.getpid(), ours
    with theirs:
        program = _PROGRAM.format(theirs.fileno(), [*_FIRST, *_preloaded_for_tests], program)
        return _spawn(path, [*flags, program], [*files, theirs.fileno()])


def _make_server_environment() -> dict[str, str]:
    """Return the additional variables of a server. Its children do not keep them."""
    # Numerical libraries start their threads on import: a process that forks may have no second
    # one. The server of Python 3.10 and 3.11 does not inherit the path of the test process.
    folder = str(Path(__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "PYTHONPATH": folder if not path else os.pathsep.join((folder, path)),
    }


@contextlib.contextmanager
def _set_variables(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
            if name in before:
                os.environ[name] = before[name]


def uses_accelerator(init: str | None) -> bool:
    """Return whether a group initialised with ``init`` uses an accelerator."""
    if init is None:
        return False
    return any(part.split(":")[0] not in _CPU_NAMES for part in init.split(","))
