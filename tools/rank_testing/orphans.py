"""The end of ranks whose test process is gone, and the stacks of stuck ranks on request."""

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

    Neither a parent-death signal nor the fork server, its parent, would ever end it, as it keeps
    the server alive. What the rank started goes too, and so does the folder of the run.
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
