"""A real tracking server, which stops and dies during a run and is started a second time."""

import logging
import math
import time

import pytest
import torch

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
    training_log,
)
from mcore.observe.sinks.mlflow import _TIMEOUT_S
from rank_testing import preload

preload("mcore.observe", "mlflow.store.tracking.sqlalchemy_store")
pytestmark = [
    pytest.mark.slow,  # a server takes seconds to start, and it starts twice
    pytest.mark.needs("mlflow"),
]

PASSWORD = "pa55word-of-the-server"


@pytest.fixture
def server(tmp_path, tracking_server):
    server = tracking_server(tmp_path)
    server.start()
    yield server
    server.kill()


def log_steps(state, first, last):
    """Return the seconds of the slowest step."""
    slowest_s = 0.0
    for step in range(first, last + 1):
        began_s = time.monotonic()
        state.train_state.step = step
        state.train_state.consumed_train_samples = 4 * step
        losses = {"lm loss": torch.tensor(step / 4), "odd@1": torch.tensor(math.nan)}
        losses["far"] = torch.tensor(-math.inf)
        training_log(
            losses, {}, 1e-4, None, 1.0, False, 0, None, None, None,
            state.cfg, state, None, None,
        )  # fmt: skip
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    return slowest_s


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for five minutes"
        time.sleep(0.02)


def test_a_server_that_stops_dies_and_comes_back_costs_one_warning_and_no_value(
    server, caplog, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    caplog.set_level(logging.INFO)
    logger = LoggerConfig(
        log_interval=1000,
        tensorboard_log_interval=1,
        closing_s=300.0,
        mlflow_experiment="observe",
        mlflow_run_name="outage",
        mlflow_tracking_uri=f"http://me:{PASSWORD}@127.0.0.1:{server.port}",
    )
    train = TrainingConfig(micro_batch_size=4, train_iters=60)
    state = GlobalState(ConfigContainer(logger=logger, train=train), train_state=TrainState())
    run = state.mlflow_logger
    run.open()

    log_steps(state, 1, 10)
    run.flush()
    arrived = [m.step for m in run.client.get_metric_history(run.run_id, "lm loss")]
    assert arrived == list(range(1, 11))

    log_steps(state, 11, 20)  # not all of them sent when the server stops
    server.stop()
    # A step that waited for the server would wait for the time limit of a call.
    assert log_steps(state, 21, 30) < _TIMEOUT_S / 2
    assert run.num_missing >= 10 * 5
    server.kill()
    wait_for(lambda: "MLflow is unreachable" in caplog.text)
    log_steps(state, 31, 40)
    assert state.sinks()[0].is_on

    server.start()
    log_steps(state, 41, 60)
    state.close()

    for name in ("lm loss", "odd_at_1", "learning-rate", "batch-size", "samples vs steps"):
        history = run.client.get_metric_history(run.run_id, name)
        assert sorted(m.step for m in history) == list(range(1, 61)), name
    history = run.client.get_metric_history(run.run_id, "lm loss")
    assert {m.step: m.value for m in history} == {s: s / 4 for s in range(1, 61)}
    assert all(math.isnan(m.value) for m in run.client.get_metric_history(run.run_id, "odd_at_1"))
    far = {m.value for m in run.client.get_metric_history(run.run_id, "far")}
    assert far == {-1.7976931348623157e308}  # the number that MLflow stores for an infinity
    kept = run.client.get_run(run.run_id)
    assert kept.info.status == "FINISHED"

    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("MLflow is unreachable, training continues: ")
    assert "MLflow is reachable again, 0 values wait on the disk for a replay" in caplog.text
    assert PASSWORD not in caplog.text + str(kept.data.params) + repr(state.cfg) + repr(run)
    assert kept.data.params["logger.mlflow_tracking_uri"] == f"http://***@127.0.0.1:{server.port}"
