import importlib.util
import math
import subprocess
import sys
import threading
import time

import pytest

from mcore.observe.sinks.mlflow_run import MlflowRun, open_mlflow

pytestmark = [
    pytest.mark.slow,  # a fresh database takes MLflow seconds
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow"),
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri):
    from mlflow.tracking import MlflowClient  # takes seconds, which collection should not pay

    return MlflowClient(uri)


class FakeClient:
    """Keeps what is sent, and can fail."""

    def __init__(self, fail_at=(), gate=None):
        self.batches, self.ended = [], []
        self.fail_at, self.gate = fail_at, gate

    def log_batch(self, run_id, metrics=(), params=()):
        if self.gate is not None:
            self.gate.wait()
        self.batches.append([(m.key, m.value, m.step) for m in metrics])
        if len(self.batches) in self.fail_at:
            raise OSError(f"batch {len(self.batches)}")

    def set_terminated(self, run_id, status):
        self.ended.append((run_id, status))


def test_at_most_64_batches_wait():
    gate = threading.Event()
    run = MlflowRun(FakeClient(gate=gate), "r")
    sent = []

    def send():
        for step in range(80):
            run.log_metrics({"a": 1.0}, step)
            sent.append(step)

    sender = threading.Thread(target=send)
    sender.start()
    deadline = time.monotonic() + 60  # the first batch waits for the import of mlflow
    while len(sent) < 64 and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.join(timeout=1.0)
    num_sent = len(sent)
    gate.set()  # before the assertion: a thread that waits for ever would keep pytest from ending
    sender.join()
    assert 64 <= num_sent <= 65  # those that wait, and the one that is being sent
    run.close()
    assert [batch[0][2] for batch in run.client.batches] == list(range(80))
    assert run.client.ended == [("r", "FINISHED")]


def test_an_error_in_the_background_comes_out_and_the_run_is_ended_all_the_same():
    run = MlflowRun(FakeClient(fail_at={2}), "r")
    run.log_metrics({"a": 1.0}, 1)
    run.flush()
    run.log_metrics({"a": 1.0}, 2)
    with pytest.raises(OSError, match="batch 2"):
        run.close("FAILED")
    assert run.client.ended == [("r", "FAILED")]
    run.close()
    assert len(run.client.ended) == 1


def test_none_is_left_out_and_large_steps_are_split():
    run = MlflowRun(FakeClient(), "r")
    run.log_metrics({"a": None, "b": 2.0}, 3)
    run.log_metrics({str(i): 1.0 for i in range(1500)}, 4)
    run.log_metrics({"a": None}, 5)
    run.release()
    assert [len(batch) for batch in run.client.batches] == [1, 1000, 500]
    assert run.client.batches[0] == [("b", 2.0, 3)]
    assert run.client.ended == []


def test_a_real_run_keeps_all_values_of_all_steps(uri, client):
    run = open_mlflow(
        "runs",
        "one",
        tracking_uri=uri,
        tags={"team": "a"},
        description="what it is",
        params={"size": "7", "long": "x" * 7000},
    )
    values = {"nan": math.nan, "inf": math.inf, "one": 1.0}
    for step in range(30):
        run.log_metrics(values, step)
    run.close()
    kept = client.get_run(run.run_id)
    assert (kept.info.status, kept.info.run_name) == ("FINISHED", "one")
    assert kept.data.tags["team"] == "a"
    assert kept.data.tags["mlflow.note.content"] == "what it is"
    assert kept.data.params["size"] == "7"
    assert len(kept.data.params["long"]) == 6000
    history = client.get_metric_history(run.run_id, "one")
    assert sorted((m.step, m.value) for m in history) == [(step, 1.0) for step in range(30)]
    assert all(math.isnan(m.value) for m in client.get_metric_history(run.run_id, "nan"))


def test_a_run_can_be_continued_and_stays_the_one_that_is_written(uri, client):
    first = open_mlflow("runs", "first", tracking_uri=uri)
    first.log_metrics({"a": 1.0}, 1)
    first.release()
    assert client.get_run(first.run_id).info.status == "RUNNING"
    other = open_mlflow("runs", "other", tracking_uri=uri)
    again = open_mlflow("runs", "first", tracking_uri=uri, run_id=first.run_id)
    again.log_metrics({"a": 2.0}, 2)
    again.close()
    other.close()
    history = client.get_metric_history(first.run_id, "a")
    assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("folder", ["file:///tmp/x", "mlruns", "./mlruns", "/tmp/mlruns"])
def test_a_folder_of_files_is_refused(folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ValueError, match="is a folder of files"):
        open_mlflow("e", "r", tracking_uri=folder)


SCRIPT = """
import os, signal, sys, time
from mcore.observe import ConfigContainer, GlobalState, LoggerConfig
logger = LoggerConfig(mlflow_experiment="ends", mlflow_run_name=sys.argv[2],
                      mlflow_tracking_uri=sys.argv[1])
state = GlobalState(ConfigContainer(logger=logger))
for step in range(30):
    state.mlflow_logger.log_metrics({"a": 1.0}, step)
print("logged", flush=True)
"""

ENDINGS = {
    "normal": ("", "FINISHED", 0),
    "exit in a with block": ("with state: raise SystemExit(3)", "FAILED", 3),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "KILLED", 143),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_ends_as_its_process_does_and_loses_nothing(name, uri, client, tmp_path):
    ending, status, code = ENDINGS[name]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending, uri, name],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert "logged" in done.stdout, done.stderr
    assert done.returncode == code, done.stderr
    experiment = client.get_experiment_by_name("ends")
    (run,) = client.search_runs(
        [experiment.experiment_id], f"attributes.run_name = '{name}'", max_results=2
    )
    assert run.info.status == status
    assert len(client.get_metric_history(run.info.run_id, "a")) == 30
