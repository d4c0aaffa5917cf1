"""The life of one rank, from its first line to its exit."""

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from rank_testing import orphans
from rank_testing.failures import failed
from rank_testing.messages import (
    Outcome,
    Request,
    output_path,
    rendezvous_path,
    send_outcome,
    stack_path,
)
from rank_testing.server import uses_accelerator
from rank_testing.target import load_target

_LAST_RESORT_S = 30.0
# The test process reports a hang with each rank's stack: the group must not time out before that.
_GROUP_TIMEOUT_MARGIN_S = 10.0


def main(request: Request, connection: Connection) -> NoReturn:
    """Run ``request`` in this process, send its outcome and leave without any teardown.

    A rank that returned stays until the test process closes the connection: its peers may still be
    reading what it sent. A rank that failed leaves at once, so that its peers notice.
    """
    os.setpgid(0, 0)
    gc.freeze()  # what the fork server has imported is no garbage, and there is much of it
    _redirect_output(output_path(request.folder, request.rank))
    with open(stack_path(request.folder, request.rank), "a") as stack_file:
        orphans.end_with_parent(request.folder)
        orphans.end_at_the_latest(request.timeout_s + _LAST_RESORT_S, stack_file)
        orphans.write_stacks_on_request(stack_file)
        outcome = _run(request)
        _flush()
        with contextlib.suppress(ConnectionError):
            send_outcome(connection, outcome)
            if outcome.kind == "returned":
                os.read(connection.fileno(), 1)
        _flush()
        os._exit(0)


def _run(request: Request) -> Outcome:
    try:
        value = _call(request)
    except BaseException as error:
        return failed(error, without_frames_of=__file__)
    try:
        return Outcome("returned", time.monotonic(), value=pickle.dumps(value))
    except BaseException as error:
        unpicklable = TypeError(
            f"the return value ({type(value).__name__}) cannot be pickled: "
            f"{type(error).__name__}: {error}"
        )
        unpicklable.__cause__ = error
        return failed(unpicklable, without_frames_of=__file__)


def _call(request: Request) -> Any:
    _apply_environment(request.environment)
    # A process that was made by a fork server would use one by default.
    multiprocessing.set_start_method(request.start_method, force=True)
    _show_warnings()
    # Torch is imported in functions: a spawned rank imports it only now, with its variables, and
    # the test process, which imports this module too, may do without it.
    import torch

    torch.set_num_threads(1)  # the ranks of a test share the machine's cores
    function = load_target(request.target)
    args, kwargs = pickle.loads(request.call)
    if request.init is not None:
        _join_group(request.init, request)
    return function(*args, **kwargs)


def _join_group(init: str, request: Request) -> None:
    """Initialise ``torch.distributed``; the ranks meet through a file, so no port can clash."""
    import torch.distributed as dist

    on_accelerator = uses_accelerator(init)
    if on_accelerator:
        _select_device(init, request.rank, request.world_size)
    timeout = datetime.timedelta(seconds=request.timeout_s + _GROUP_TIMEOUT_MARGIN_S)
    path = rendezvous_path(request.folder)
    store = dist.FileStore(path, request.world_size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(
        init, store=store, rank=request.rank, world_size=request.world_size, timeout=timeout
    )
    if not on_accelerator:
        # A rank that fails before its peers are connected to it would leave them waiting.
        dist.barrier()


def _select_device(init: str, rank: int, world_size: int) -> None:
    import torch

    count = torch.accelerator.device_count()
    needed = world_size if "nccl" in init else 1
    if count < needed:
        raise RuntimeError(
            f"init={init!r} with {world_size} ranks needs {needed} accelerators, "
            f"this machine has {count}; skip the test here or start fewer ranks"
        )
    torch.accelerator.set_device_index(rank % count)


def _apply_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _show_warnings() -> None:
    """Show deprecations, as pytest does, unless Python's own options say what to show."""
    if not sys.warnoptions:
        warnings.simplefilter("default", DeprecationWarning)
        warnings.simplefilter("default", PendingDeprecationWarning)


def _redirect_output(path: str) -> None:
    """Send both standard streams to ``path``, line by line, including those of C++ code."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        for number in (1, 2)
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
