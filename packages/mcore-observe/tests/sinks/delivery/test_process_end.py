import signal

import pytest

from mcore.observe import status_of
from rank_testing import preload
from rank_testing.scripts import run_script

preload("mcore.observe")


def run(code):
    start = "import os, signal, sys, time\n"
    start += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup ignores it
    done = run_script(start + code)
    return done.stdout.split("\n")[:-1], done.returncode, done.stderr


WATCH = (
    "from mcore.observe.sinks.delivery.process_end import on_process_end\non_process_end(print)\n"
)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (SystemExit(), "FINISHED"),
        (SystemExit(0), "FINISHED"),
        (SystemExit(1), "FAILED"),
        (SystemExit("text"), "FAILED"),
        (SystemExit(256), "FINISHED"),  # the system keeps the last eight bits
        (SystemExit(143), "KILLED"),
        (SystemExit(129), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (ValueError(), "FAILED"),
    ],
)
def test_status_of_an_exception(error, status):
    assert status_of(error) == status


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        ("", "FINISHED", 0),
        ("1 / 0", "FAILED", 1),
        ("sys.exit(1)", "FAILED", 1),
        ("sys.exit(0)", "FINISHED", 0),
        ("sys.exit(259)", "FAILED", 3),
        ("sys.exit('text')", "FAILED", 1),
        ("raise KeyboardInterrupt", "KILLED", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "KILLED", 143),
        ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)", "KILLED", 129),
    ],
)
def test_endings(ending, status, code):
    out, returncode, err = run(WATCH + ending)
    assert (out, returncode) == ([status], code)
    assert ("ZeroDivisionError" in err) == ("1 / 0" in ending)


BLOCK = """
from mcore.observe.sinks.delivery.process_end import exit_code_of, on_process_end, status_of
def show(status): print(status, exit_code_of(status), flush=True)
class Block:
    def __enter__(self): pass
    def __exit__(self, kind, error, traceback): show(status_of(error))
on_process_end(show)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "1 / 0",
        "sys.exit(3)",
        "sys.exit(259)",
        "sys.exit('text')",
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        "try: 1 / 0\n    except ZeroDivisionError: sys.exit(5)",
    ],
)
def test_the_exit_code_of_a_block_and_of_its_process_is_that_of_the_system(ending):
    out, code, _ = run(BLOCK + f"with Block():\n    {ending}")
    # A shell shows 128 + the signal's number for a process that a signal ended.
    shown = 128 - code if code < 0 else code
    status = "KILLED" if shown > 128 else "FAILED"
    assert out == [f"{status} {shown}"] * 2


def test_a_block_whose_error_is_caught_leaves_no_exit_code():
    out, code, _ = run(
        BLOCK + "try:\n    with Block(): 1 / 0\nexcept ZeroDivisionError: pass\nshow('KILLED')"
    )
    # 143 is the usual exit code of KILLED.
    assert (out, code) == (["FAILED 1", "KILLED 143", "FINISHED 0"], 0)


def test_other_hooks_and_handlers_are_kept():
    out, _, _ = run(
        "sys.excepthook = lambda *error: print('theirs', error[0].__name__)\n"
        "signal.signal(signal.SIGTERM, lambda *a: print('their handler'))\n"
        + WATCH
        + "os.kill(os.getpid(), signal.SIGTERM)\n1 / 0"
    )
    assert out == ["their handler", "theirs ZeroDivisionError", "FAILED"]


def test_callbacks_run_once_last_first_and_a_failing_one_does_not_stop_the_others():
    out, code, err = run(
        WATCH
        + "on_process_end(lambda status: 1 / 0)\n"
        + "on_process_end(lambda status: print('last', status))\n"
        + "on_process_end(lambda status: print('taken back'))()\n"
    )
    assert out == ["last FINISHED", "FINISHED"]
    assert code == 0
    assert "an end-of-process callback failed" in err


def test_a_forked_child_neither_reports_nor_resists_sigterm():
    out, _, _ = run(
        WATCH
        + "there, here = os.pipe()\n"
        + "child = os.fork()\n"
        + "if child == 0: os.write(here, b'x'); time.sleep(60)\n"
        + "os.read(there, 1); os.kill(child, signal.SIGTERM)\n"
        + "print('child', os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)\n"
    )
    assert out == ["child 15", "FINISHED"]
    out, _, _ = run(
        WATCH
        + "child = os.fork()\n"
        + "if child: os.waitpid(child, 0); print('parent', flush=True)\n"
    )
    assert out == ["parent", "FINISHED"]
