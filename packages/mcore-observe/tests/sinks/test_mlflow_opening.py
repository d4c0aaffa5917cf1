import socket
import threading
import time

import pytest

from mcore.observe.sinks import MlflowConnection, MlflowRun, TrackingServer

pytestmark = [
    pytest.mark.slow,  # importing MLflow takes seconds
    pytest.mark.needs("mlflow"),
]


class FakeClient:
    """Keeps all batches."""

    def __init__(self):
        self.batches, self.ended = [], []

    def log_batch(self, run_id, metrics=(), params=()):
        self.batches.append([(m.key, m.value, m.step) for m in metrics])

    def set_terminated(self, run_id, status):
        self.ended.append((run_id, status))

    @property
    def steps(self):
        return [step for batch in self.batches for _, _, step in batch]


class Opener:
    """Opens a run after the given failures, once it is allowed to."""

    def __init__(self, failures=()):
        self.client, self.failures, self.calls = FakeClient(), list(failures), 0
        self.may_open = threading.Event()
        self.may_open.set()

    def __call__(self):
        self.calls += 1
        self.may_open.wait(600)
        if self.failures:
            raise self.failures.pop(0)
        return MlflowConnection(self.client, "r", last_steps={"old": 2})


def run_of(opener, **options):
    """A run that waits long enough at its end for the import of MLflow."""
    return MlflowRun(opener, **{"closing_s": 120.0} | options)


def opening(opener, **options):
    run = run_of(opener, **options)
    run.open_in_background()
    return run


def test_metrics_logged_before_the_run_is_open_wait_in_order():
    opener = Opener()
    opener.may_open.clear()
    run = opening(opener)
    for step in range(5):
        run.log_metrics({"new": 1.0, "old": 2.0}, step)
    run.flush()  # would never return if it waited for the run
    assert not run.is_open
    assert run.num_missing == 10
    opener.may_open.set()
    run.close()
    assert (run.is_open, run.run_id, run.num_missing) == (True, "r", 0)
    new = [entry for batch in opener.client.batches for entry in batch if entry[0] == "new"]
    assert new == [("new", 1.0, step) for step in range(5)]
    old = [entry for batch in opener.client.batches for entry in batch if entry[0] == "old"]
    assert old == [("old", 2.0, 3), ("old", 2.0, 4)]
    assert opener.client.ended == [("r", "FINISHED")]
    assert opener.calls == 1


def test_a_run_that_nothing_was_logged_to_is_opened_and_ended():
    opener = Opener()
    opening(opener).close("FAILED")
    assert opener.client.ended == [("r", "FAILED")]


def test_a_run_that_nobody_opens_is_opened_by_its_first_metrics():
    opener = Opener()
    run = run_of(opener)
    assert (run.is_open, run.run_id, run.client, opener.calls) == (False, "", None, 0)
    run.log_metrics({"a": 1.0}, 1)
    run.close()
    assert opener.client.steps == [1]
    assert opener.calls == 1
    run_of(opener).close()
    assert opener.calls == 1  # there was nothing to write


def test_a_released_connection_goes_on_in_another_run():
    first = run_of(Opener())
    first.log_metrics({"a": 1.0}, 1)
    first.release()
    second = run_of(first.open)
    second.log_metrics({"a": 1.0}, 2)
    second.close()
    assert first.client.steps == [1, 2]
    assert first.client.ended == [("r", "FINISHED")]


def test_a_server_that_is_unreachable_at_first_is_one_warning(caplog):
    refused = "cannot reach http://me:pa55word@host"
    opener = Opener([ConnectionError(refused), RuntimeError("not now")])
    run = opening(opener, name="MLflow at http://***@host")
    run.log_metrics({"a": 1.0}, 1)
    run.close()
    assert opener.client.steps == [1]
    assert opener.client.ended == [("r", "FINISHED")]
    assert opener.calls == 3
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith("MLflow at http://***@host is unreachable, training continues: ")
    assert warning.endswith(": ConnectionError: cannot reach http://***@host")


def test_a_server_that_stays_unreachable_is_given_up_and_missing_values_are_counted(caplog):
    opener = Opener([ConnectionError("no")] * 1000)
    run = opening(opener)
    run.log_metrics({"a": 1.0, "b": 1.0}, 1)
    run.log_metrics({"a": 1.0}, 2)
    run.closing_s = 0.1
    run.close()
    assert (run.is_open, run.num_missing, run.num_logged) == (False, 3, 3)
    assert opener.client.ended == []
    assert "MLflow is unreachable: 3 values of steps 1 to 2 have not arrived" in caplog.text
    with pytest.raises(RuntimeError, match="was closed"):
        run.log_metrics({"a": 1.0}, 3)


def test_a_run_that_is_opened_for_too_long_is_not_waited_for():
    opener = Opener()
    opener.may_open.clear()
    run = opening(opener)
    run.closing_s = 0.1
    run.close()  # would never return if it waited for the run
    opener.may_open.set()
    assert opener.client.ended == []


def test_a_library_that_is_missing_comes_out():
    opener = Opener([ModuleNotFoundError("no mlflow"), ModuleNotFoundError("no mlflow")])
    opener.may_open.clear()  # or the first call might already know
    run = opening(opener)
    run.log_metrics({"a": 1.0}, 1)
    opener.may_open.set()
    with pytest.raises(ModuleNotFoundError, match="no mlflow"):
        run.close()


def test_a_second_close_waits_for_the_first():
    run = opening(Opener())
    ended = threading.Event()
    run.open()

    def take_long(run_id, status):
        time.sleep(0.2)
        ended.set()

    run.client.set_terminated = take_long
    first = threading.Thread(target=run.close)
    first.start()
    while not run._ended:
        time.sleep(0.001)
    run.close()
    assert ended.is_set()
    first.join(300)


@pytest.fixture
def refusing_port():
    """A port that is taken, but on which no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_missing_server_is_found_without_retries(refusing_port):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException) as caught:
        TrackingServer(f"http://127.0.0.1:{refusing_port}").check()
    assert caught.value.get_http_status_code() == 500
