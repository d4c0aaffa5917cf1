"""No rank outlives its test process, and a stuck rank can be asked where it is."""

import faulthandler
import multiprocessing
import os
import shutil
import signal
import threading
from typing import TextIO

# Its default action is to be ignored: a rank that has not registered it yet is not harmed.
STACK_SIGNAL = signal.SIGURG


def end_with_parent(folder: str) -> None:
    """Start the daemon thread that ends this rank when the test process is gone.

    A rank is a child of the fork server and holds the pipe that keeps the server alive, so neither
    a parent-death signal nor the server itself would ever end it: this thread does, and the server
    ends with its last rank. The rank leads a process group of its own; what it started goes too,
    and so does the folder of the run.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("a rank is started by run_ranks, not as a program")

    def wait_and_end() -> None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait_and_end, name="rank_testing-parent", daemon=True).start()


def end_at_the_latest(after_s: float, stack_file: TextIO) -> None:
    """End this process after ``after_s`` seconds even where no Python code can run any more."""
    faulthandler.dump_traceback_later(after_s, exit=True, file=stack_file)


def write_stacks_on_request(stack_file: TextIO) -> None:
    """Write every thread's Python stack to ``stack_file`` on ``STACK_SIGNAL`` and on a crash.

    The handler runs in C, so a thread that holds the interpreter lock does not keep it from
    writing. A timer would do as well, but Python has only one and the last resort needs it.
    """
    faulthandler.enable(file=stack_file)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)


def kill_group(pid: int) -> None:
    """Kill the rank ``pid`` with everything it started and left in its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
