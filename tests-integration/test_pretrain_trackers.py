"""What a run leaves in JSONL, TensorBoard and MLflow, and the commands it prints to look at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain_runs import (
    PASSWORD,
    TINY,
    assert_no_password,
    curves_of,
    environment,
    events_of,
    known_to_mlflow,
    last_value,
    mlflow_of,
    pretrain,
    wait_until,
)
from rank_testing import free_port

pytestmark = pytest.mark.xdist_group("pretrain_trackers")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on two ranks after six of its eight steps, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    done = pretrain(
        folder, *TINY, "--train-iters", "8", "--exit-after", "6", "--log-interval", "2",
        "--save-interval", "4", "--run-dir", "run", "--experts", "2", "--ep", "2", "--mtp", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def copy_of(run: Path, folder: Path) -> Path:
    """A copy of a run that a test may continue from."""
    return shutil.copytree(run, folder / "run")


def test_mlflow_has_every_metric_of_every_step(finished: tuple[Path, str]) -> None:
    run, output = finished
    facts = json.loads((run / "mlflow.json").read_text())
    found, history = mlflow_of(f"sqlite:///{run / 'mlflow.db'}", facts["run_id"])
    assert history == known_to_mlflow(curves_of(run))
    assert {"lm loss", "grad-norm", "params-norm", "step-time", "time/remaining_estimate"} <= set(
        history
    )
    assert {"moe/load_balancing_loss_layer_1", "z_loss", "mtp_1_acceptance_rate"} <= set(history)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["global_batch_size"] == "8"
    assert not (run.parent / "mlruns").exists()
    command = last_value(output, "MLflow")
    assert command == "hatch run mlflow ui --backend-store-uri sqlite:///run/mlflow.db"


def test_mlflow_shows_each_step_at_its_own_time(finished: tuple[Path, str]) -> None:
    from mlflow.tracking import MlflowClient

    run, _ = finished
    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    stamps = {m.step: m.timestamp / 1000 for m in client.get_metric_history(run_id, "lm loss")}
    seconds = curves_of(run)["time/total"]
    # A step's stamp is taken after its seconds since the start, and before those of the next step.
    latest_start = min(stamps[step] - seconds[step] for step in range(1, 7))
    earliest_start = max(stamps[step] - seconds[step + 1] for step in range(1, 6))
    assert earliest_start <= latest_start + 2e-3


def test_tensorboard_has_every_metric_of_every_step(finished: tuple[Path, str]) -> None:
    run, output = finished
    events = events_of(run)
    for name, curve in curves_of(run).items():
        if name == "samples vs steps":
            continue
        assert [step for step, _ in events[name]] == list(curve), name
        assert [value for _, value in events[name]] == pytest.approx(
            list(curve.values()), rel=1e-6
        ), name
    over_samples = [(8 * step, value) for step, value in events["lm loss"]]
    assert events["lm loss vs samples"] == over_samples
    assert last_value(output, "TensorBoard") == "hatch run tensorboard --logdir run/tensorboard"


def test_every_rank_has_its_memory_logged(finished: tuple[Path, str]) -> None:
    curves = curves_of(finished[0])
    for rank in (0, 1):
        now = curves[f"memory/rank{rank}/mem-host-rss-gigabytes"]
        most = curves[f"memory/rank{rank}/mem-max-host-rss-gigabytes"]
        assert list(now) == list(most) == [2, 4, 6]
        assert all(0.05 < now[step] <= most[step] < 20 for step in now)
    assert not any("/rank2/" in name for name in curves)


def test_throughput_and_time_left_follow_from_the_step_times(finished: tuple[Path, str]) -> None:
    curves = curves_of(finished[0])
    took, window = curves["step-time"], 2
    assert list(took) == list(range(1, 7))
    for step, rate in curves["throughput/batches_per_sec"].items():
        counted = [took[past] for past in range(max(1, step - window + 1), step + 1)]
        assert rate == pytest.approx(len(counted) / sum(counted), rel=1e-4)
        assert curves["throughput/tokens_per_sec"][step] == pytest.approx(rate * 8 * 32)
        assert curves["throughput/device/samples_per_sec"][step] == pytest.approx(rate * 8 / 2)
    for step, left in curves["time/remaining_estimate"].items():
        used = curves["time/total"][step]
        assert left == pytest.approx(used / step * (8 - step))
        assert used >= sum(took[past] for past in range(2, step + 1))


def test_steps_done_again_are_logged_once_everywhere(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    """A start that is killed some time after its checkpoint has logged steps that come again."""
    run = copy_of(finished[0], tmp_path)
    first = curves_of(run)["lm loss"]
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    done = pretrain(tmp_path, "--resume", "run")
    assert done.returncode == 0, done.stderr
    curves = curves_of(run)
    assert list(curves["lm loss"]) == list(range(1, 9))
    assert [curves["lm loss"][step] for step in first] == list(first.values())

    facts = json.loads((run / "mlflow.json").read_text())
    assert facts == json.loads((finished[0] / "mlflow.json").read_text())
    found, history = mlflow_of(f"sqlite:///{run / 'mlflow.db'}", facts["run_id"])
    assert history["lm loss"] == sorted(curves["lm loss"].items())
    for name, points in known_to_mlflow(curves).items():
        steps = [step for step, _ in history[name]]
        assert steps == sorted(set(steps)), name
        assert {step for step, _ in points} <= set(steps), name
    assert found.info.status == "FINISHED"

    events = events_of(run)
    for name, curve in curves.items():
        if name != "samples vs steps":
            assert [step for step, _ in events[name]] == sorted(curve), name
    assert [at for at, _ in events["lm loss vs samples"]] == list(range(8, 72, 8))


@pytest.fixture
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Start printed commands with a port; they are ended, with all they started, afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(cwd: Path, command: str, **env: str) -> None:
        words = shlex.split(command)
        assert words[:2] == ["hatch", "run"]
        with (tmp_path / "server.log").open("wb") as log:
            process = subprocess.Popen(
                words[2:], cwd=cwd, env={**environment(), **env},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        started.append(process)

    yield serve
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fetch(url: str, body: dict[str, Any] | None = None, timeout_s: float = 600) -> bytes:
    """Open a page as soon as it is served."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return bytes(answer.read())
        except OSError:
            assert time.monotonic() < deadline, f"nothing at {url}"
            time.sleep(0.2)


def test_the_printed_tensorboard_command_shows_the_run(
    finished: tuple[Path, str], serving: Any
) -> None:
    run, output = finished
    port = free_port()
    serving(run.parent, f"{last_value(output, 'TensorBoard')} --port {port}")
    assert b"TensorBoard" in fetch(f"http://127.0.0.1:{port}/")
    tags = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
    wait_until(lambda: b"lm loss" in fetch(tags))


def test_the_printed_mlflow_command_shows_the_run_and_serves_others(
    finished: tuple[Path, str], serving: Any, tmp_path: Path
) -> None:
    run, output = finished
    port = free_port()
    command = last_value(output, "MLflow")
    serving(run.parent, command, MLFLOW_PORT=str(port), MLFLOW_WORKERS="1",
            MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    assert b"<title>MLflow</title>" in fetch(f"{address}/")
    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    shown = json.loads(fetch(f"{address}/api/2.0/mlflow/runs/get?run_id={run_id}"))
    assert shown["run"]["info"]["run_name"] == "run"
    assert "lm loss" in {metric["key"] for metric in shown["run"]["data"]["metrics"]}

    uri = f"http://someone:{PASSWORD}@127.0.0.1:{port}"
    done = pretrain(
        tmp_path, *TINY, "--train-iters", "2", "--run-dir", "to_server", "--mlflow-uri", uri
    )
    assert done.returncode == 0, done.stderr
    page = last_value(done.stdout, "MLflow")
    matched = re.fullmatch(r"http://\*\*\*@127\.0\.0\.1:\d+/#/experiments/\d+/runs/(\w+)", page)
    assert matched, page
    _, history = mlflow_of(address, matched[1])
    assert history == known_to_mlflow(curves_of(tmp_path / "to_server"))
    assert_no_password(tmp_path, done)

    refused = pretrain(tmp_path, "--resume", "to_server", "--train-iters", "3")
    assert refused.returncode == 2
    assert "and the password is not stored: pass --mlflow-uri or --no-mlflow" in refused.stderr
