"""The main job with MLflow: ended runs, servers that are away, passwords, refused addresses."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest

from pretrain.cli.command import main
from pretrain.run.checkpoints import latest_step
from pretrain.run_folder import RunFolder
from pretrain_runs import (
    PASSWORD,
    TINY,
    assert_no_password,
    curves_of,
    known_to_mlflow,
    last_value,
    mlflow_of,
    pretrain,
    ranks_below,
    start,
    wait_until,
)
from rank_testing import free_port


@pytest.mark.parametrize(
    ("ended", "statuses"),
    [("0", {"KILLED", "FAILED"}), ("1", {"RUNNING"}), ("all", {"KILLED"})],
    ids=["other-rank-killed", "logging-rank-killed", "ctrl-c"],
)
def test_a_run_that_is_ended_is_marked_and_goes_on(
    ended: str, statuses: set[str], tmp_path: Path
) -> None:
    job = start(
        tmp_path, *TINY, "--train-iters", "100000", "--save-interval", "5", "--keep-last", "2",
        "--run-dir", "run", stdout=subprocess.DEVNULL,
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    try:
        wait_until(lambda: folder.mlflow_facts.exists() and metrics_in(folder) > 0)
        wait_until(lambda: any(folder.checkpoints.glob("step_*")))
        if ended == "all":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(ranks_below(job.pid)[int(ended)], signal.SIGKILL)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()  # the launcher ends its ranks
        job.wait(30)
    said = "interrupted by SIGINT" if ended == "all" else f"rank {ended} was killed by SIGKILL"
    assert f"pretrain: {said}; all ranks ended." in errors
    assert "MLflow" not in errors
    run_id = json.loads(folder.mlflow_facts.read_text())["run_id"]
    uri = f"sqlite:///{folder.mlflow_database}"
    found, _ = mlflow_of(uri, run_id)
    assert found.info.status in statuses
    if ended != "1":
        return

    last = latest_step(folder)
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", str(last + 3))
    assert done.returncode == 0, done.stderr
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


def test_a_password_is_in_no_command_line_and_no_output(tmp_path: Path) -> None:
    uri = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}"
    job = start(tmp_path, *TINY, "--train-iters", "100000", "--run-dir", "run", "--mlflow-uri", uri)
    try:
        wait_until(lambda: len(ranks_below(job.pid)) == 2)
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in ranks_below(job.pid).values()]
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    finally:
        os.killpg(job.pid, signal.SIGINT)
        output, errors = job.communicate(timeout=60)
    assert len(lines) == 2
    assert all("run" in line and PASSWORD not in line for line in lines)
    assert_no_password(tmp_path, subprocess.CompletedProcess([], 0, output, errors))


def test_a_dead_server_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    uri = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}"
    done = pretrain(tmp_path, *TINY, "--train-iters", "3", "--run-dir", "run", "--no-tensorboard",
                    entry=main, MLFLOW_TRACKING_URI=uri)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "MLflow" in line)
    assert said.startswith("pretrain: MLflow at http://***@127.0.0.1:")
    assert "training continues" in said
    closing = last_value(done.stdout, "MLflow")
    assert re.search(r" has not taken (\d+) of \1 values; they are in run/metrics\.jsonl$", closing)
    assert list(curves_of(tmp_path / "run")["lm loss"]) == [1, 2, 3]
    assert_no_password(tmp_path, done)
    assert "TensorBoard" not in done.stdout
    assert not list((tmp_path / "run").glob("mlflow*"))
    assert not (tmp_path / "run" / "tensorboard").exists()

    resumed = pretrain(tmp_path, "--resume", "run", "--train-iters", "5")  # to a file of its own
    assert resumed.returncode == 0, resumed.stderr
    run_id = json.loads((tmp_path / "run" / "mlflow.json").read_text())["run_id"]
    _, history = mlflow_of(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}", run_id)
    assert history == known_to_mlflow(curves_of(tmp_path / "run"))


REFUSED = {
    "no uri": ("--mlflow-uri nonsense", "--mlflow-uri nonsense must start with http://, https://"),
    "folder": ("--mlflow-uri file:///tmp/x", "--mlflow-uri file:///tmp/x must start with http://"),
    "no host": ("--mlflow-uri http://", "--mlflow-uri http:// names no host"),
    "port": (f"--mlflow-uri http://a:{PASSWORD}@h:http", "http://***@h:http is not a URI: "),
    "no folder": ("--mlflow-uri sqlite:///no/where.db", "there is no folder no for the database"),
    "both": ("--mlflow-uri http://h --no-mlflow", "--mlflow-uri needs --mlflow, which is off"),
    "mistyped": (f"--mlflowuri http://a:{PASSWORD}@h", "unrecognized arguments: --mlflowuri"),
    "name": ("--run-dir what?", "choose a path without ?, # and %, or give --no-mlflow"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_address_is_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    done = pretrain(tmp_path, *shlex.split(arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("pretrain: error: ")
    assert done.stderr.count("\n") == 1
    assert PASSWORD not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
