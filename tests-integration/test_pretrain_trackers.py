"""What a run leaves in JSONL, TensorBoard and MLflow, and the commands it prints to look at it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore.observe.sinks import sanitize_metric_name
from mcore.parallel import ProcessGroups
from pretrain.corpus import draw_batch, load_corpus
from pretrain.run.checkpoints import latest_step
from pretrain.run.training import build_model, train, transformer_config
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.earlier_logs import forget_later_events
from rank_testing import free_port, run_ranks

TOOLS = Path(__file__).resolve().parents[1] / "tools"
PASSWORD = "open-sesame-7"
TINY = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --eval-interval 0"
)
Curves = dict[str, dict[int, float]]


def environment() -> dict[str, str]:
    """The environment of a user who is no rank and has no MLflow of their own."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    scripts = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PYTHONPATH": str(TOOLS), "PATH": scripts}


def pretrain(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in ``cwd`` and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd,
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def records_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's JSONL file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curves_of(run: Path) -> Curves:
    """Each metric of the JSONL file by step; a step that comes twice is an error."""
    curves: Curves = defaultdict(dict)
    for record in records_of(run):
        for name, value in record.items():
            if name != "step":
                assert record["step"] not in curves[name], f"{name} twice at {record['step']}"
                curves[name][record["step"]] = value
    return curves


def events_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the TensorBoard files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def mlflow_of(uri: str, run_id: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """An MLflow run and the history of every metric it has."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    history = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in run.data.metrics
    }
    return run, history


def known_to_mlflow(curves: Curves) -> dict[str, list[tuple[int, float]]]:
    """What MLflow is to have, from what the JSONL file has."""
    names = {"throughput/tflops/device": "throughput/tflops_per_device"}
    return {
        sanitize_metric_name(names.get(name, name)): sorted(curve.items())
        for name, curve in curves.items()
    }


def last_value(output: str, label: str) -> str:
    """What the closing lines say behind a label."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{label}  "))
    return line.removeprefix(label).strip()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on two ranks after six of its eight steps, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    done = pretrain(
        folder, *TINY, "--train-iters", "8", "--exit-after", "6", "--log-interval", "2",
        "--save-interval", "4", "--run-dir", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


def copy_of(run: Path, folder: Path) -> Path:
    """A copy of a run that a test may go on from."""
    return shutil.copytree(run, folder / "run")


def test_mlflow_has_every_metric_of_every_step(finished: tuple[Path, str]) -> None:
    run, output = finished
    facts = json.loads((run / "mlflow.json").read_text())
    found, history = mlflow_of(f"sqlite:///{run / 'mlflow.db'}", facts["run_id"])
    assert history == known_to_mlflow(curves_of(run))
    assert {"lm loss", "grad-norm", "params-norm", "step-time", "time/remaining_estimate"} <= set(
        history
    )
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


def test_event_files_keep_each_axis_up_to_the_checkpoint(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "tensorboard"))
    for step in range(1, 6):
        writer.add_scalar("loss", step, step)
        writer.add_scalar("loss vs samples", step, 100 * step)
    writer.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    forget_later_events(tmp_path / "tensorboard", step=3, samples=300)
    assert events_of(tmp_path) == {
        "loss": [(1, 1.0), (2, 2.0), (3, 3.0)],
        "loss vs samples": [(100, 1.0), (200, 2.0), (300, 3.0)],
    }


def ranks_below(pid: int) -> dict[str, int]:
    """Process of each rank that a launcher has started."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        for item in Path(f"/proc/{child}/environ").read_bytes().decode().split("\0"):
            if item.startswith("RANK="):
                found[item.removeprefix("RANK=")] = int(child)
    return found


@pytest.mark.parametrize(
    ("ended", "statuses"),
    [("0", {"KILLED", "FAILED"}), ("1", {"RUNNING"}), ("all", {"KILLED"})],
    ids=["other-rank-killed", "logging-rank-killed", "ctrl-c"],
)
def test_a_run_that_is_ended_is_marked_and_goes_on(
    ended: str, statuses: set[str], tmp_path: Path
) -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "pretrain", *TINY, "--train-iters", "100000", "--save-interval",
         "5", "--keep-last", "2", "--run-dir", "run"],
        cwd=tmp_path, env=environment(), start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    try:
        wait_until(lambda: folder.mlflow_facts.exists() and metrics_in(folder) > 0)
        wait_until(lambda: any(folder.checkpoints.glob("step_*")))
        if ended == "all":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(ranks_below(job.pid)[ended], signal.SIGKILL)
        _, errors = job.communicate(timeout=30)
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
    import sqlite3

    database = sqlite3.connect(f"file:{folder.mlflow_database}?mode=ro", uri=True, timeout=30)
    try:
        (count,) = database.execute("select count(*) from metrics").fetchone()
    finally:
        database.close()
    return int(count)


def wait_until(condition: Any, timeout_s: float = 120) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


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
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fetch(url: str, body: dict[str, Any] | None = None, timeout_s: float = 120) -> bytes:
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
    serving(run.parent, command, MLFLOW_PORT=str(port), MLFLOW_WORKERS="1")
    address = f"http://127.0.0.1:{port}"
    assert b"<title>MLflow</title>" in fetch(f"{address}/")
    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    shown = json.loads(fetch(f"{address}/api/2.0/mlflow/runs/get?run_id={run_id}"))
    assert shown["run"]["info"]["run_name"] == "run"
    assert "lm loss" in {metric["key"] for metric in shown["run"]["data"]["metrics"]}

    uri = f"http://someone:{PASSWORD}@127.0.0.1:{port}"
    done, command_lines = pretrain_watched(
        tmp_path, *TINY, "--train-iters", "2", "--run-dir", "to_server", "--mlflow-uri", uri
    )
    assert done.returncode == 0, done.stderr
    assert len(command_lines) == 2
    assert all("to_server" in line and PASSWORD not in line for line in command_lines)
    page = last_value(done.stdout, "MLflow")
    matched = re.fullmatch(r"http://\*\*\*@127\.0\.0\.1:\d+/#/experiments/\d+/runs/(\w+)", page)
    assert matched, page
    _, history = mlflow_of(address, matched[1])
    assert history == known_to_mlflow(curves_of(tmp_path / "to_server"))
    assert_no_password(tmp_path, done)

    refused = pretrain(tmp_path, "--resume", "to_server", "--train-iters", "3")
    assert refused.returncode == 2
    assert "whose password is not kept: give --mlflow-uri again, or --no-mlflow" in refused.stderr


def pretrain_watched(
    cwd: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the command on two ranks; also returns their command lines, which all may see."""
    job = subprocess.Popen(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_until(lambda: job.poll() is not None or len(ranks_below(job.pid)) == 2)
        pids = ranks_below(job.pid).values()
        lines = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
        output, errors = job.communicate(timeout=180)
    finally:
        job.terminate()  # the launcher ends its ranks
        job.wait(30)
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors), lines


def assert_no_password(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Nothing that was printed or written holds the password."""
    assert PASSWORD not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_a_dead_server_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    uri = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}"
    done = pretrain(tmp_path, *TINY, "--train-iters", "3", "--run-dir", "run", "--no-tensorboard",
                    MLFLOW_TRACKING_URI=uri)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "MLflow" in line)
    assert said.startswith("pretrain: MLflow at http://***@127.0.0.1:")
    assert "training goes on" in said
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
    "port": (f"--mlflow-uri http://a:{PASSWORD}@h:http", "http://***@h:http is no URI: "),
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


SMALL = Settings(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, train_iters=3,
    global_batch_size=8, warmup_iters=2, eval_interval=0, eval_batches=1, save_interval=2,
    log_interval=2, tensorboard=False, dp=1,
)  # fmt: skip


def train_here(settings: Settings, run_dir: str) -> None:
    """One rank of the main job, in a process group that exists."""
    path = Path(run_dir)
    path.mkdir(parents=True, exist_ok=True)
    train(settings, RunFolder(path), torch.device("cpu"), resume=None)


def whole_parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, read by PyTorch alone."""
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith("model.") and hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def norm_of(tensors: Any) -> float:
    """The norm of all elements, summed in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def gradient_norm_of_one_process(checkpoint: str, step: int) -> float:
    """The norm of the gradient that the whole model has for the batch of a step."""
    alone = dataclasses.replace(SMALL, tp=1, cp=1, dp=1)
    device = torch.device("cpu")
    model = build_model(alone, transformer_config(alone), ProcessGroups.from_sizes(), device)
    wanted = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in whole_parameters(Path(checkpoint)).items():
            wanted.pop(name).copy_(values)
    assert not wanted
    batch = draw_batch(
        load_corpus().train, rows=slice(None), batch_size=alone.global_batch_size,
        seq_length=alone.seq_length, seed=alone.seed, step=step,
    )  # fmt: skip
    logits = model(batch["tokens"], batch["position_ids"])
    labels = batch["labels"].transpose(0, 1)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return norm_of(param.grad for param in model.parameters())


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"dp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "dp": 2, "fsdp": True}],
    ids=["tp2", "dp2", "tp2-cp2", "tp2-fsdp2"],
)
def test_norms_are_those_of_the_whole_model(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, **layout)
    run_ranks(train_here, settings.world_size, settings, str(tmp_path), timeout_s=120)
    curves = curves_of(tmp_path)
    assert list(curves["params-norm"]) == [2, 3]
    for step, norm in curves["params-norm"].items():
        whole = whole_parameters(tmp_path / "checkpoints" / f"step_{step:08d}")
        assert norm == pytest.approx(norm_of(whole.values()), rel=1e-6)
    before = str(tmp_path / "checkpoints" / "step_00000002")
    (expected,) = run_ranks(gradient_norm_of_one_process, 1, before, 3, timeout_s=120)
    assert curves["grad-norm"][3] == pytest.approx(expected, rel=1e-4)
    ranks = {name.split("/")[1] for name in curves if name.startswith("memory/")}
    assert Counter(ranks) == Counter(f"rank{rank}" for rank in range(settings.world_size))
    assert not (tmp_path / "tensorboard").exists()
    assert not list(tmp_path.glob("mlflow*"))
