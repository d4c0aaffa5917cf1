"""Runs of the main job that a signal ends: what stays behind, and that they go on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain_runs import ENDLESS, TINY, mlflow_of, pretrain, ranks_below, started, wait_until


@pytest.mark.parametrize(
    ("ended", "statuses"),
    [("0", {"KILLED", "FAILED"}), ("1", {"RUNNING"}), ("all", {"KILLED"})],
    ids=["other-rank-killed", "logging-rank-killed", "ctrl-c"],
)
def test_an_ended_run_leaves_no_process_is_marked_and_goes_on(
    ended: str, statuses: set[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    with started(
        tmp_path, *TINY, *ENDLESS, "--save-interval", "5", "--keep-last", "2", "--run-dir", "run"
    ) as job:
        wait_until(lambda: folder.mlflow_facts.exists() and metrics_in(folder) > 0)
        wait_until(lambda: any(folder.checkpoints.glob("step_*")))
        below = processes_below(job.pid)
        if ended == "all":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(ranks_below(job.pid)[int(ended)], signal.SIGKILL)
        done = job.wait()
    errors = done.stderr
    said = "interrupted by SIGINT" if ended == "all" else f"rank {ended} was killed by SIGKILL"
    assert f"pretrain: {said}; all ranks ended. The last complete checkpoint is run/" in errors
    assert done.returncode == (130 if ended == "all" else 1)
    assert "MLflow" not in errors
    assert "Traceback" not in errors
    assert len(below) >= 2
    assert all(is_gone(pid) for pid in below)
    run_id = json.loads(folder.mlflow_facts.read_text())["run_id"]
    uri = f"sqlite:///{folder.mlflow_database}"
    found, _ = mlflow_of(uri, run_id)
    assert found.info.status in statuses
    if ended == "all":
        return

    last = latest_step(folder)
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", str(last + 3))
    assert done.returncode == 0, done.stderr
    assert latest_step(folder) == last + 3
    found, history = mlflow_of(uri, run_id)
    assert found.info.status == "FINISHED"
    steps = [step for step, _ in history["lm loss"]]
    assert steps[: last + 3] == list(range(1, last + 4))
    assert steps == sorted(set(steps))


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
