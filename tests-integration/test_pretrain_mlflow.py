"""The main job with MLflow: servers that are away, passwords, refused addresses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pretrain.cli.claim import claim, still_ours
from pretrain.cli.command import main
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, read_settings
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.mlflow_target import choose_target
from pretrain_runs import (
    PASSWORD,
    TINY,
    assert_no_password,
    curves_of,
    known_to_mlflow,
    last_value,
    mlflow_of,
    pretrain,
)
from rank_testing import free_port


def main_after_an_import(arguments: list[str]) -> int:
    """The command, whose ten seconds at the end are not spent on importing MLflow."""
    import mlflow.tracking  # noqa: F401

    return main(arguments)


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_a_dead_server_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    uri = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}"
    done = pretrain(tmp_path, *TINY, "--train-iters", "3", "--run-dir", "run", "--no-tensorboard",
                    entry=main_after_an_import, MLFLOW_TRACKING_URI=uri)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "MLflow" in line)
    assert said.startswith("pretrain: MLflow at http://***@127.0.0.1:")
    assert "training continues" in said
    closing = last_value(done.stdout, "MLflow")
    missing = r" did not receive (\d+) of \1 values\. They are in run/metrics\.jsonl$"
    assert re.search(missing, closing)
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
    check_that_a_job_without_its_folder_sends_nothing(tmp_path / "run", run_id)


def check_that_a_job_without_its_folder_sends_nothing(path: Path, run_id: str) -> None:
    """A job that was frozen until another one had taken over must not log beside it."""
    folder = RunFolder(path)
    target = choose_target(folder, None)
    with claim(path):
        settings = Settings(**read_settings(path))
        job = JobRun(settings, folder, target, 5, still_ours(path))
        frozen = job.logger
        frozen.open()
        assert job.is_starting  # until what has waited is sent
        frozen.log_metrics({"lm loss": 2.5}, 6)
        frozen.flush()
        assert not job.is_starting
    with claim(path):
        frozen.log_metrics({"lm loss": 3.5}, 7)
        with pytest.raises(RuntimeError, match="a later start of the job uses the run folder"):
            frozen.close("FAILED")
    run, history = mlflow_of(target.uri, run_id)
    assert history["lm loss"][-1] == (6, 2.5)
    assert run.info.status == "RUNNING"


REFUSED = {
    "no uri": ("--mlflow-uri nonsense", "--mlflow-uri nonsense must start with http://, https://"),
    "folder": ("--mlflow-uri file:///tmp/x", "--mlflow-uri file:///tmp/x must start with http://"),
    "no host": ("--mlflow-uri http://", "--mlflow-uri http:// has no host"),
    "port": (f"--mlflow-uri http://a:{PASSWORD}@h:http", "http://***@h:http is not a URI: "),
    "no folder": ("--mlflow-uri sqlite:///no/where.db", "folder no of the database does not exist"),
    "both": ("--mlflow-uri http://h --no-mlflow", "--mlflow-uri needs --mlflow, which is off"),
    "mistyped": (f"--mlflowuri http://a:{PASSWORD}@h", "unrecognized arguments: --mlflowuri"),
    "name": ("--run-dir what?", "choose a path without ?, # and %, or pass --no-mlflow"),
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
