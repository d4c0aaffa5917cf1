"""Trackers that are unreachable during a run and at its end: all values arrive later."""

import json
import os
import signal
import socket
import statistics
import sys
import threading
import time

import pytest

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    MemorySink,
    training_log,
)
from mcore.observe.__main__ import main
from mcore.observe.sinks.delivery.tracker_run import TrackerRun
from rank_testing import preload
from rank_testing.scripts import Script, run_script

preload("mcore.observe", "torch.utils.tensorboard")
preload("mlflow.store.tracking.sqlalchemy_store")

pytestmark = [
    pytest.mark.xdist_group("sinks_away"),  # one worker makes the runs
    pytest.mark.slow,  # processes that import MLflow and W&B, and one server
    pytest.mark.needs("mlflow", "tensorboard", "wandb"),
]

STEPS = 30
SCRIPT = """
import json, os, signal, sys, time
import torch
from mcore.observe import *
starts, ending = json.loads(sys.argv[1]), sys.argv[2]
for first, settings in starts:
    logger = LoggerConfig(log_interval=1000, **settings)
    state = GlobalState(ConfigContainer(logger=logger, train=TrainingConfig(micro_batch_size=2)))
    for step in range(first, 31):
        state.train_state.step = step
        state.train_state.consumed_train_samples = 2 * step
        losses = {"lm loss": torch.tensor(step / 4 + first)}
        training_log(losses, {}, 1e-4, None, 1.0, False, 0, None, None, None, state.cfg, state,
                     None, None)
    if len(starts) > 1:
        state.close()
print("logged", flush=True)
exec(ending)
"""
# Each ending with the trackers that it is about, since importing one takes seconds.
TRACKERS = {
    "exit": ("wandb",),
    "term": ("mlflow", "tensorboard"),
    "kill": ("mlflow", "tensorboard", "wandb"),
}
ENDINGS = {
    "exit": "sys.exit(3)",
    "term": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    # The event file gets the last values without another step.
    "kill": """
from pathlib import Path
from mcore.observe.sinks.tensorboard import _read_events
def count_losses():
    files = Path(starts[0][1]["tensorboard_dir"]).iterdir()
    values = [v for file in files for event in _read_events(file) for v in event.summary.value]
    return sum(value.tag == "lm loss" for value in values)
while count_losses() < 30: time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
""",
}


WAITS_LONG = {"MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "60"}  # a client that waits takes 840 s


def environment():
    nowhere = "http://127.0.0.1:9"
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    quiet |= {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true"}
    quiet |= {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    quiet |= WAITS_LONG
    quiet |= {"HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}
    return os.environ | quiet


def settings_of(name, folder, uri, trackers=("mlflow", "tensorboard", "wandb")):
    settings = {
        "mlflow_experiment": "away",
        "mlflow_run_name": name,
        "mlflow_tracking_uri": uri,
        "tensorboard_dir": str(folder / "tensorboard"),
        "wandb_project": "away",
        "wandb_exp_name": name,
        "wandb_save_dir": str(folder),
    }
    chosen = {key: value for key, value in settings.items() if key.startswith(trackers)}
    return chosen | {"run_dir": str(folder)}


def start(folder, starts, ending=""):
    env = environment() | {"RUN_OF_THE_TEST": str(folder)}
    return Script(SCRIPT, json.dumps(starts), ending, env=env, cwd=folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tracking_server, wait_for_helpers):
    """Runs that ended in different ways without a server, and the server, which runs now."""
    root = tmp_path_factory.mktemp("away")
    server = tracking_server(root)
    uri = f"http://127.0.0.1:{server.port}"
    folders = {name: root / name for name in ENDINGS}
    scripts, errors = {}, {}
    for name, folder in folders.items():
        folder.mkdir()
        settings = settings_of(name, folder, uri, TRACKERS[name]) | {"closing_s": 1.0}
        scripts[name] = start(folder, [(1, settings)], ENDINGS[name])
    for name, script in scripts.items():
        script.wait_until_printed("logged\n", 600)
        errors[name] = script.wait(600).stderr
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        for folder in folders.values():
            wait_for_helpers(f"RUN_OF_THE_TEST={folder}")
            assert main(["replay", str(folder)]) == 0
        yield {"folders": folders, "uri": uri, "errors": errors}
    server.kill()


def mlflow_run(runs, name):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(runs["uri"])
    experiment = client.get_experiment_by_name("away")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return client, run


def sent_to_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    if "lm loss" not in events.Tags()["scalars"]:
        return []
    return [(e.step, e.value) for e in events.Scalars("lm loss")]


@pytest.fixture(scope="module")
def records(wandb_records):
    def read(folder):
        for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
            yield from wandb_records(path)

    return read


EXPECTED = [(step, step / 4 + 1) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("name", ["term", "kill"])
def test_mlflow_has_every_value_once_and_knows_how_the_run_ended(runs, name):
    client, run = mlflow_run(runs, name)
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert sorted((m.step, m.value) for m in history) == EXPECTED
    assert run.info.status == "KILLED"
    assert run.data.params["logger.log_interval"] == "1000"


@pytest.mark.parametrize("name", ["term", "kill"])
def test_tensorboard_has_every_value_once(runs, name):
    assert sorted(sent_to_tensorboard(runs["folders"][name])) == EXPECTED


@pytest.mark.parametrize("name", ["exit", "kill"])
def test_wandb_has_every_value_once_and_knows_how_the_run_ended(runs, records, name):
    rows, codes = [], []
    for record in records(runs["folders"][name]):
        if record.WhichOneof("record_type") == "history":
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            rows.append((record.history.step.num, json.loads(items["lm loss"])))
        elif record.WhichOneof("record_type") == "exit":
            codes.append(record.exit.exit_code)
    assert sorted(rows) == EXPECTED
    # The process ends with 3. On a busy machine the replay ends the run, and a spool has no code.
    assert codes[-1] in {"exit": (3, 1), "kill": (143,)}[name]


@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left_on_the_disk(runs, name):
    assert not (runs["folders"][name] / "spool").exists()


def test_the_end_waits_no_longer_than_it_may(runs):
    assert "python -m mcore.observe replay" in runs["errors"]["term"]


def test_a_second_replay_finds_nothing(runs, capsys):
    assert main(["replay", str(runs["folders"]["kill"])]) == 0
    assert capsys.readouterr().out.startswith("nothing is left to send in ")


def test_a_resumed_run_continues_its_trackers_and_drops_later_points(runs, records, tmp_path):
    """The first start ends at step 30. The second continues from step 20 with other values."""
    settings = settings_of("resumed", tmp_path, runs["uri"]) | {"closing_s": 240}
    script = start(tmp_path, [(1, settings), (21, settings | {"resume_step": 20})])
    done = script.wait(600)
    assert done.returncode == 0, done.stderr
    expected = [(step, step / 4 + (1 if step <= 20 else 21)) for step in range(1, STEPS + 1)]
    client, run = mlflow_run(runs, "resumed")
    history = client.get_metric_history(run.info.run_id, "lm loss")
    latest = {m.step: m.value for m in sorted(history, key=lambda m: m.timestamp)}
    assert sorted(latest.items()) == expected
    assert run.info.status == "FINISHED"
    assert sent_to_tensorboard(tmp_path) == expected
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["lm loss"]) for line in lines] == expected
    ids = {r.run.run_id for r in records(tmp_path) if r.WhichOneof("record_type") == "run"}
    assert len(ids) == 1  # W&B continues the same run
    steps = [
        r.history.step.num for r in records(tmp_path) if r.WhichOneof("record_type") == "history"
    ]
    assert sorted(steps) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "hangs"])
def test_a_step_never_waits_for_a_tracker(tmp_path, monkeypatch, answers, caplog):
    if "wandb" in sys.modules:  # it has read the variables of an earlier test
        sys.modules["wandb"].teardown()
    threads = set(threading.enumerate())
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen(50)  # connections are accepted and never read
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        for name, value in WAITS_LONG.items():
            monkeypatch.setenv(name, value)
        logger = LoggerConfig(closing_s=0.1, **settings_of("x", tmp_path, address))
        state = GlobalState(ConfigContainer(logger=logger), extra_sinks=[MemorySink()])
        import torch

        handed_s = []
        original = TrackerRun.log_metrics

        def timed(run, *args, **options):
            began_s = time.thread_time()
            original(run, *args, **options)
            handed_s.append(time.thread_time() - began_s)

        monkeypatch.setattr(TrackerRun, "log_metrics", timed)
        began_s = time.monotonic()
        for step in range(1, 201):
            state.train_state.step = step
            training_log(
                {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
                state.cfg, state, None, None,
            )  # fmt: skip
        took_s = time.monotonic() - began_s
        missing = state.mlflow_logger.num_missing, state.wandb_logger.num_missing
        state.close("KILLED")
    assert missing == (200 * 5, 200 * 5)
    assert statistics.median(handed_s) < 1e-3
    import wandb  # a run that has ended may still be importing it

    wandb.teardown()
    assert took_s < 600  # it would take 840 s if it waited
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("mcore.observe")]
    warnings = [text for text in warnings if " is unreachable, training" in text]
    assert len(warnings) == len({text.split(" is unreachable")[0] for text in warnings}) <= 2, (
        warnings
    )
    assert len(set(threading.enumerate()) - threads) < 20


def test_signals_keep_their_handlers(tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from mcore.observe import GlobalState, MemorySink\n"
        "GlobalState(extra_sinks=[MemorySink()])\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
    )
    done = run_script(code)
    assert done.returncode == 0, done.stderr
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
