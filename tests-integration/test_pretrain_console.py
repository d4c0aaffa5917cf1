"""The main job where its console breaks: it trains on, and all of its ranks do."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from pretrain.cli.ending import Ending
from pretrain.cli.launch import _make_launch_config
from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain_runs import (
    TINY,
    environment,
    launcher,
    losses_of,
    patient_main,
    pretrain,
    wait_until,
)

WORDS = (*TINY, "--no-mlflow", "--no-tensorboard", "--run-dir", "run", "--log-interval", "1")
SAVED = ("--train-iters", "6", "--save-interval", "4", "--eval-interval", "2")


def broken_console(arguments: list[str]) -> int:
    """Be a rank whose standard output is closed, or is a pipe that nobody reads; errors are lost.

    As Python finds them: it ignores SIGPIPE, and has no stream where there is no file.
    """
    if os.environ["RANK"] == "0":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]
    else:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    return patient_main(arguments)


@pytest.mark.slow
def test_a_console_that_breaks_takes_nothing_from_training(tmp_path: Path) -> None:
    done = pretrain(tmp_path, *WORDS, *SAVED, "--slow-rank", "0:3", entry=broken_console)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    folder = RunFolder(tmp_path / "run")
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "step_00000004", "step_00000006",
    ]  # fmt: skip
    assert len(losses_of(folder.path)) == 6
    assert folder.page.is_file()


def full_output(arguments: list[str]) -> int:
    """Be a rank whose console is a file on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    return patient_main(arguments)


@pytest.mark.slow
def test_errors_still_say_that_the_console_is_full(tmp_path: Path) -> None:
    done = pretrain(tmp_path, *WORDS, *SAVED, "--no-straggler", entry=full_output)
    assert done.returncode == 0
    assert set(done.stderr.splitlines()) == {  # of each rank that prints
        "pretrain: warning: cannot write to standard output (No space left on device); "
        "training continues without it"
    }
    assert latest_step(RunFolder(tmp_path / "run")) == 6


# The first terminal that a session opens is that of the session.
IN_A_TERMINAL = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may be under nohup too
terminal = os.open(os.environ.pop("TERMINAL"), os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.close(terminal)
"""


@pytest.mark.slow
def test_a_terminal_that_goes_away_saves_and_ends_the_job(tmp_path: Path) -> None:
    """The kernel sends SIGHUP; what the job then says finds no terminal, its exit code is kept."""
    folder = RunFolder(tmp_path / "run")
    words = [*WORDS, "--train-iters", "100000", "--slow-rank", "1:60", "--grace-s", "300"]
    terminal, theirs = pty.openpty()
    env = {**environment(), "TERMINAL": os.ttyname(theirs)}
    job = launcher(tmp_path, "pretrain", *words, first=IN_A_TERMINAL, env=env)
    try:
        wait_until(lambda: folder.metrics.exists() and folder.metrics.read_text().count("\n") > 5)
        os.close(theirs)
        os.close(terminal)
        ended = job.wait(600)
    finally:
        job.send(signal.SIGKILL)
    assert ended.returncode == 128 + signal.SIGHUP
    assert latest_step(folder) == len(losses_of(folder.path))


def test_nohup_keeps_sighup_from_the_launcher_and_from_ranks() -> None:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        handled = _make_launch_config(Settings(), Path()).signals_to_handle
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it to what it starts
        handled_then = _make_launch_config(Settings(), Path()).signals_to_handle
        ending = Ending(300)
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        while not ending.requested:
            time.sleep(0.01)
        told = "SIGHUP" in handled and handled_then == "SIGTERM,SIGINT,SIGQUIT"
        os._exit(ending.requested if told else 99)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == signal.SIGTERM
