"""One rank: the request it receives, the function it runs and the outcome it leaves."""

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

from rank_testing.server import uses_accelerator
from rank_testing.target import Target, load_target

# Ignored by default: a rank that has not registered it yet is not harmed.
STACK_SIGNAL = signal.SIGURG
_LAST_RESORT_S = 30.0
# The test process reports a hang with each rank's stack: the group must not time out before that.
_GROUP_TIMEOUT_MARGIN_S = 10.0
_CONNECTION_TYPES = ("DistNetworkError", "DistStoreError")
# Messages of gloo and NCCL about a peer that is gone or does not answer. Their other errors, such
# as tensors of different sizes, are causes.
_CONNECTION_TEXT = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|pair closure"
    r"|timed out waiting \d+ ?ms|connectFullMesh failed|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Request:
    """The work of one rank."""

    rank: int
    world_size: int
    target: Target
    call: bytes  # its pickled arguments
    environment: dict[str, str]  # all variables of the rank
    start_method: str | None  # of multiprocessing, or None for Python's default
    init: str | None  # for init_process_group, or None for no group
    timeout_s: float
    folder: str  # of this run, for the rendezvous and the files of all ranks

    def path(self, kind: str) -> str:
        """Return the path of a file of this rank: its output, its stacks or its outcome."""
        return os.path.join(self.folder, f"rank{self.rank}.{kind}")


@dataclass(frozen=True)
class Outcome:
    """The end of the function in one rank; "connection" is an error that a lost peer causes."""

    kind: Literal["returned", "raised", "connection"]
    moment: float  # of time.monotonic(), which all processes of a machine share
    value: bytes = b""  # the pickled return value
    exception_type: str = ""
    message: str = ""
    traceback: str = ""


def main(request: Request, connection: Connection) -> NoReturn:
    """Run ``request`` in this process, report its outcome and exit without any teardown.

    A rank that returned stays until the test process closes the connection, because its peers may
    still be reading the data that it sent. A rank that failed exits at once, so its peers notice.
    """
    os.setpgid(0, 0)
    gc.freeze()  # the modules of the fork server are no garbage, and there are many
    gc.enable()
    _redirect_output(request.path("output"))
    with open(request.path("stack"), "a") as stack_file:
        _end_with_parent(request.folder)
        # These handlers run in C, so they work while a thread holds the interpreter lock. Python
        # has a single timer, and the last resort needs it: stacks are requested by a signal.
        faulthandler.dump_traceback_later(
            request.timeout_s + _LAST_RESORT_S, exit=True, file=stack_file
        )
        faulthandler.enable(file=stack_file)
        faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
        outcome = _run(request)
        with contextlib.suppress(OSError):  # the test process is gone
            with open(request.path("outcome"), "wb") as file:
                pickle.dump(outcome, file)
            _flush()
            connection.send_bytes(b"outcome")
            if outcome.kind == "returned":
                os.read(connection.fileno(), 1)
        _flush()
        os._exit(0)


def _run(request: Request) -> Outcome:
    try:
        value = _call(request)
    except BaseException as error:
        return describe_error(error)
    try:
        return Outcome("returned", time.monotonic(), value=pickle.dumps(value))
    except BaseException as error:
        unpicklable = TypeError(
            f"the return value ({type(value).__name__}) cannot be pickled: "
            f"{type(error).__name__}: {error}"
        )
        unpicklable.__cause__ = error
        return describe_error(unpicklable)


def _call(request: Request) -> Any:
    for name in set(os.environ) - set(request.environment):
        del os.environ[name]
    os.environ.update(request.environment)
    # A process made by a fork server would make others by a fork server too.
    multiprocessing.set_start_method(request.start_method, force=True)
    if not sys.warnoptions:  # show deprecations, as pytest does
        warnings.simplefilter("default", DeprecationWarning)
        warnings.simplefilter("default", PendingDeprecationWarning)
    # Torch is imported in functions: a spawned rank must import it after its variables are set,
    # and the test process, which imports this module too, may not need it.
    import torch

    torch.set_num_threads(1)  # the ranks of a test share the machine's cores
    function = load_target(request.target)
    args, kwargs = pickle.loads(request.call)
    if request.init is not None:
        if request.init.partition(":")[0] == "standin":
            import standin

            standin.switch_on(request.rank)
        _join_group(request.init, request)
    return function(*args, **kwargs)


def _join_group(init: str, request: Request) -> None:
    """Initialise ``torch.distributed`` through a file, so ports cannot clash."""
    import torch.distributed as dist

    on_accelerator = uses_accelerator(init)
    if on_accelerator:
        _select_device(init, request.rank, request.world_size)
    timeout = datetime.timedelta(seconds=request.timeout_s + _GROUP_TIMEOUT_MARGIN_S)
    path = os.path.join(request.folder, "rendezvous")
    store = dist.FileStore(path, request.world_size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(
        init, store=store, rank=request.rank, world_size=request.world_size, timeout=timeout
    )
    if not on_accelerator:
        # If a rank failed before its peers are connected to it, they would wait for it.
        dist.barrier()


def _select_device(init: str, rank: int, world_size: int) -> None:
    import torch

    count = torch.accelerator.device_count()
    needed = world_size if "nccl" in init else 1
    if count < needed:
        raise RuntimeError(
            f"init={init!r} with {world_size} ranks needs {needed} accelerators, "
            f"this machine has {count}: skip the test here or start fewer ranks"
        )
    torch.accelerator.set_device_index(rank % count)


def describe_error(error: BaseException) -> Outcome:
    """Return the outcome of a rank that raised ``error``, without the frames of this module.

    An error counts as a lost connection if the first error of its chain is one: neither a wrapper
    around it nor an error during cleanup changes the cause.
    """
    position = error.__traceback__
    while position is not None and position.tb_frame.f_code.co_filename == __file__:
        position = position.tb_next
    root, seen = error, set[int]()
    while id(root) not in seen:
        seen.add(id(root))
        root = root.__cause__ or (not root.__suppress_context__ and root.__context__) or root
    is_lost = (
        isinstance(root, ConnectionError)
        or type(root).__name__ in _CONNECTION_TYPES
        or (isinstance(root, RuntimeError) and _CONNECTION_TEXT.search(str(root)))
    )
    return Outcome(
        "connection" if is_lost else "raised",
        time.monotonic(),
        exception_type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, position)),
    )


def _end_with_parent(folder: str) -> None:
    """Start the daemon thread that ends this rank when the test process is gone.

    A parent-death signal would not do: the parent is the fork server, which lives as long as its
    ranks. The thread also ends the programs that the rank started and removes the run's folder.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("run_ranks starts ranks: this module is no program")

    def wait_for_parent() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait_for_parent, name="rank_testing-parent", daemon=True).start()


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
