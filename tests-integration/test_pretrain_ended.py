"""Runs of the main job that a signal ends: what stays behind, and that they go on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from mcore.parallel.checkpoint import is_complete_checkpoint
from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain_runs import (
    ENDLESS,
    TINY,
    environment,
    losses_of,
    mlflow_of,
    pretrain,
    ranks_below,
    started,
    wait_until,
)
from rank_testing.scripts import Script

# Each step is followed by a save in the background, of a model large enough to be met at it.
SAVING = shlex.split("--save-interval 1 --async-save --num-layers 4 --hidden-size 128")


@pytest.mark.parametrize(
    ("ended", "saves", "statuses"),
    [
        ("0", ["--save-interval", "5"], {"KILLED", "FAILED"}),
        ("1", SAVING, {"RUNNING"}),
        ("all", ["--save-interval", "5"], {"KILLED"}),
    ],
    ids=["other-rank-killed", "logging-rank-killed-while-saving", "ctrl-c"],
)
@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_an_ended_run_leaves_no_process_is_marked_and_goes_on(
    ended: str, saves: list[str], statuses: set[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    words = [*TINY, *ENDLESS, *saves, "--keep-last", "2", "--no-tensorboard", "--run-dir", "run"]
    with started(tmp_path, *words, patient=True) as job:
        wait_until(lambda: folder.mlflow_facts.exists() and metrics_in(folder) > 0)
        wait_until(lambda: any(folder.checkpoints.glob("step_*")))
        below, ranks = processes_below(job.pid), ranks_below(job, tmp_path)
        if saves == SAVING:
            incomplete = ".step_*.incomplete-*"
            wait_until(lambda: any(folder.checkpoints.glob(incomplete)), every_s=0.001)
        if ended == "all":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(ranks[int(ended)], signal.SIGKILL)
        done = job.wait(600)
    errors = done.stderr
    said = "interrupted by SIGINT" if ended == "all" else f"rank {ended} was killed by SIGKILL"
    assert f"pretrain: {said}; all ranks ended. The last complete checkpoint is run/" in errors
    assert done.returncode == (130 if ended == "all" else 1)
    assert "MLflow" not in errors
    assert "Traceback" not in errors
    assert len(below) >= 2
    assert all(map(is_gone, ranks.values()))
    wait_until(lambda: all(map(is_gone, below)))
    run_id = json.loads(folder.mlflow_facts.read_text())["run_id"]
    uri = f"sqlite:///{folder.mlflow_database}"
    found, _ = mlflow_of(uri, run_id)
    assert found.info.status in statuses
    if ended == "all":
        return

    last = latest_step(folder)
    assert f"checkpoints/step_{last:08d}. Continue with:" in errors
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", str(last + 3))
    assert done.returncode == 0, done.stderr
    assert latest_step(folder) == last + 3
    assert len(losses_of(folder.path)) == last + 3
    assert len(os.listdir(folder.checkpoints)) == 2
    assert all(map(is_complete_checkpoint, folder.checkpoints.iterdir()))
    found, history = mlflow_of(uri, run_id)
    assert found.info.status == "FINISHED"
    steps = [step for step, _ in history["lm loss"]]
    assert steps[: last + 3] == list(range(1, last + 4))
    assert steps == sorted(set(steps))


# What the launcher of the job starts here ignores its signal: after its wait it is killed. Its own
# default is longer here than in torch, so that a busy machine has time to be told from it.
LAUNCHER_S = 600
DEAF_RANKS = f"""
from pathlib import Path
from pretrain.cli import launch
from pretrain.settings import Settings
launch._GRACE_AFTER_S = 0.5
launch.PContext.close.__defaults__ = (None, {LAUNCHER_S})
ranks = launch.elastic_launch(launch._make_launch_config(Settings(dp=2, grace_s=0.5), Path()), "sh")
ranks("-c", "trap '' TERM; touch up-$LOCAL_RANK; sleep 600")
"""


def test_the_launcher_waits_as_long_as_its_ranks_may_take(tmp_path: Path) -> None:
    """And not as long as its own default says, which torch 2.11 has no option for."""
    own = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LAUNCHER_S)}
    job = Script(DEAF_RANKS, cwd=tmp_path, env={**environment(), **own})
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
    sent = time.monotonic()
    job.send(signal.SIGTERM)
    job.wait(2 * LAUNCHER_S)
    assert 1 <= time.monotonic() - sent < LAUNCHER_S


def metrics_in(folder: RunFolder) -> int:
    """Values that the run's own MLflow store holds."""
    database = sqlite3.connect(f"file:{folder.mlflow_database}?mode=ro", uri=True, timeout=30)
    try:
        (count,) = database.execute("select count(*) from metrics").fetchone()
    finally:
        database.close()
    return int(count)


def processes_below(pid: int) -> set[int]:
    """Every process that a process has started, and those have."""
    try:
        children = {int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()
    return children.union(*(processes_below(child) for child in children))


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody has reaped counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
