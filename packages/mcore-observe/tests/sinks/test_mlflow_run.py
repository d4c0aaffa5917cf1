import math
import threading

import pytest

from mcore.observe import ConfigContainer, GlobalState, LoggerConfig
from mcore.observe.sinks import MlflowConnection, MlflowRun
from mcore.observe.sinks import open_mlflow as open_run
from mcore.observe.sinks.mlflow import is_unreachable
from rank_testing import preload
from rank_testing.scripts import run_script

preload("mcore.observe", "mlflow.store.tracking.sqlalchemy_store")

pytestmark = [
    pytest.mark.slow,  # MLflow takes seconds to import
    pytest.mark.needs("mlflow"),
]


CLOSING_S = 120.0  # a busy machine imports MLflow, or writes to its database, for that long


def open_mlflow(*names, **options):
    run = open_run(*names, **options)
    run.closing_s = CLOSING_S
    return run


@pytest.fixture(scope="module")
def uri(tmp_path_factory, mlflow_database):
    return mlflow_database(tmp_path_factory.mktemp("mlflow") / "mlflow.db")


@pytest.fixture(scope="module")
def client(uri):
    from mlflow.tracking import (
        MlflowClient,
    )  # takes seconds, which would delay the collection of tests

    return MlflowClient(uri)


class FakeClient:
    """Keeps all batches, and can fail."""

    def __init__(self, fail_at=(), gate=None, fail_with=OSError):
        self.batches, self.ended = [], []
        self.fail_at, self.gate, self.fail_with = fail_at, gate, fail_with

    def log_batch(self, run_id, metrics=(), params=()):
        if self.gate is not None:
            self.gate.wait()
        self.batches.append([(m.key, m.value, m.step) for m in metrics])
        if len(self.batches) in self.fail_at:
            raise self.fail_with(f"batch {len(self.batches)}")

    def set_terminated(self, run_id, status):
        self.ended.append((run_id, status))


def opened(client):
    run = MlflowRun(lambda: MlflowConnection(client, "r"), closing_s=CLOSING_S)
    run.open()
    return run


def test_steps_of_a_second_go_in_one_call_and_a_hanging_one_holds_nobody_up():
    gate = threading.Event()
    run = opened(FakeClient(gate=gate))
    for step in range(80):
        run.log_metrics({"a": 1.0}, step)  # a call that waits for the gate would never return
    gate.set()
    run.close()
    assert [step for batch in run.client.batches for _, _, step in batch] == list(range(80))
    assert len(run.client.batches) < 10
    assert run.client.ended == [("r", "FINISHED")]


def test_a_call_that_fails_for_a_while_is_made_again(caplog):
    run = opened(FakeClient(fail_at={1, 2}))
    run.log_metrics({"a": 1.0}, 1)
    run.flush()
    run.log_metrics({"a": 1.0}, 2)
    run.close()
    sent = [entry for batch in run.client.batches[2:] for entry in batch]
    assert sent == [("a", 1.0, 1), ("a", 1.0, 2)]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_a_refused_call_comes_out_and_the_run_is_ended_all_the_same():
    run = opened(FakeClient(fail_at={2}, fail_with=ValueError))
    run.log_metrics({"a": 1.0}, 1)
    run.flush()
    run.log_metrics({"a": 1.0}, 2)
    with pytest.raises(ValueError, match="batch 2"):
        run.close("FAILED")
    assert run.client.ended == [("r", "FAILED")]
    run.close()
    assert len(run.client.ended) == 1
    with pytest.raises(RuntimeError, match="run r was closed"):
        run.log_metrics({"a": 1.0}, 3)


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("INTERNAL_ERROR", True),
        ("TEMPORARILY_UNAVAILABLE", True),
        ("REQUEST_LIMIT_EXCEEDED", True),
        ("INVALID_PARAMETER_VALUE", False),
        ("RESOURCE_DOES_NOT_EXIST", False),
        ("PERMISSION_DENIED", False),
    ],
)
def test_which_errors_pass(code, passes):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ErrorCode

    assert is_unreachable(MlflowException("no", error_code=ErrorCode.Value(code))) is passes


def test_a_database_that_hung_up_passes():
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import BAD_REQUEST
    from sqlalchemy.exc import InterfaceError

    def fail(hung_up):
        try:
            raise InterfaceError("INSERT", {}, Exception("no"), connection_invalidated=hung_up)
        except InterfaceError as cause:
            raise MlflowException(cause, BAD_REQUEST) from cause

    for hung_up in (True, False):
        with pytest.raises(MlflowException) as caught:
            fail(hung_up)
        assert is_unreachable(caught.value) is hung_up


def test_none_is_left_out_and_large_steps_are_split():
    run = opened(FakeClient())
    run.log_metrics({"a": None, "b": 2.0}, 3)
    run.log_metrics({str(i): 1.0 for i in range(1500)}, 4)
    run.log_metrics({"a": None}, 5)
    run.release()
    assert [len(batch) for batch in run.client.batches] == [1, 1000, 500]
    assert run.client.batches[0] == [("b", 2.0, 3)]
    assert run.client.ended == []


def test_two_names_that_mlflow_takes_for_one_are_a_warning(caplog):
    run = opened(FakeClient())
    for step in (1, 2):
        run.log_metrics({"a|b": 1.0, "c": 2.0, "c_d": 3.0}, step)
        run.log_metrics({"a_b": 4.0}, step)
    run.close()
    [warning] = [one.getMessage() for one in caplog.records if "mixes" in one.getMessage()]
    assert warning == "'a|b' and 'a_b' are both 'a_b' in MLflow, which mixes them: rename one"


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


def test_settings_with_names_that_mlflow_refuses_arrive_with_the_metrics(uri, client):
    names = {
        "acc@5": "acc_at_5", "a (b)": "a _b_", "s3://b/x": "s3:/b_x", "x" * 600: "x" * 250,
        "same|": "same_", "same?": "same_", "data/../y": "data/___y",
    }  # fmt: skip
    run = open_mlflow("runs", "one", tracking_uri=uri, params={name: name[-9:] for name in names})
    run.log_metrics({"one": 1.0}, 1)
    run.close()
    kept = client.get_run(run.run_id).data
    assert kept.params == {renamed: name[-9:] for name, renamed in names.items()}
    assert kept.params["same_"] == "same?"
    assert kept.metrics == {"one": 1.0}


def test_a_continued_run_is_written_even_if_another_is_active(uri, client):
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


def test_training_that_starts_again_in_its_process_continues_the_run(uri, client):
    logger = LoggerConfig(
        mlflow_experiment="runs",
        mlflow_run_name="restarted",
        mlflow_tracking_uri=uri,
        closing_s=CLOSING_S,
    )
    state = GlobalState(ConfigContainer(logger=logger))
    runs = []
    for step in (1, 2, 3):
        runs.append(state.mlflow_logger)
        runs[-1].log_metrics({"a": step / 2}, step)
        if step < 3:
            state.reset_for_restart()
    state.close("KILLED")
    assert len(set(map(id, runs))) == 3
    (run_id,) = {run.run_id for run in runs}
    assert client.get_run(run_id).info.status == "KILLED"
    history = client.get_metric_history(run_id, "a")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_steps_that_a_continued_run_has_are_not_sent_again(uri, client):
    first = open_mlflow("runs", "again", tracking_uri=uri)
    for step in range(1, 6):
        first.log_metrics({"a@1": step}, step)
    first.log_metrics({"b": 2.0}, 2)
    first.close()
    again = open_mlflow("runs", "x", tracking_uri=uri, run_id=first.run_id, only_new_steps=True)
    for step in range(3, 8):
        again.log_metrics({"a@1": 10 * step, "b": step}, step)
    again.close()
    assert again.num_missing == 0
    history = {
        name: [(m.step, m.value) for m in client.get_metric_history(first.run_id, name)]
        for name in ("a_at_1", "b")
    }
    assert history["a_at_1"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 70)]
    assert history["b"] == [(2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]


@pytest.mark.parametrize("folder", ["file:///tmp/x", "mlruns", "./mlruns", "/tmp/mlruns"])
def test_a_folder_of_files_is_refused(folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ValueError, match="is a folder of files"):
        open_mlflow("e", "r", tracking_uri=folder)


SCRIPT = """
import os, signal, sys, time
from mcore.observe import ConfigContainer, GlobalState, LoggerConfig
logger = LoggerConfig(mlflow_experiment="ends", mlflow_run_name=sys.argv[2],
                      mlflow_tracking_uri=sys.argv[1], closing_s=120.0)
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
    done = run_script(SCRIPT + ending, uri, name, cwd=tmp_path, timeout_s=300)
    assert "logged" in done.stdout, done.stderr
    assert done.returncode == code, done.stderr
    experiment = client.get_experiment_by_name("ends")
    (run,) = client.search_runs(
        [experiment.experiment_id], f"attributes.run_name = '{name}'", max_results=2
    )
    assert run.info.status == status
    assert len(client.get_metric_history(run.info.run_id, "a")) == 30
