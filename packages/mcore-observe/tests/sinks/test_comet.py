"""A training run that logs to Comet offline, read back from the experiment's archive."""

import json
import math
import os
import sys
import zipfile

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
from rank_testing import run_ranks

pytestmark = pytest.mark.needs("comet_ml")


def train():
    sys.argv = ["train.py", "--the-key", "argument-of-the-program"]
    logger = LoggerConfig(
        log_interval=100,
        tensorboard_log_interval=2,
        closing_s=100.0,
        comet_project="pretraining",
        comet_experiment_name="first",
        comet_tags=["a", "b"],
    )
    config = ConfigContainer(
        logger=logger, train=TrainingConfig(micro_batch_size=2, train_iters=10)
    )
    before = {name: value for name, value in os.environ.items() if name != "COMET_API_KEY"}
    with GlobalState(config, train_state=TrainState()) as state:
        for step in range(1, 11):
            state.train_state.step = step
            state.train_state.consumed_train_samples = 2 * step
            loss = torch.tensor(math.nan if step == 6 else step / 4)
            training_log(
                {"lm loss": loss}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
                config, state, None, None,
            )  # fmt: skip
    assert "COMET_API_KEY" not in os.environ
    return before == dict(os.environ)


def test_an_experiment_holds_its_settings_and_every_metric_with_its_step(tmp_path, offline):
    (kept_environment,) = run_ranks(train, 1, init=None, env=offline(tmp_path), timeout_s=300)
    assert kept_environment
    (path,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        experiment = json.loads(archive.read("experiment.json"))
        text = archive.read("messages.json").decode()
    messages = [json.loads(line) for line in text.splitlines()]
    assert experiment["project_name"] == "pretraining"
    assert {"a", "b"} <= set(experiment["tags"])
    assert "argument-of-the-program" not in text
    assert "def train" not in text  # the source code
    kinds = {message["type"] for message in messages}
    assert kinds <= {"metric_msg", "parameter_msg", "log_other", "ws_msg"}

    def payloads(kind):
        return [m["payload"] for m in messages if m["type"] == kind]

    others = {other["key"]: other["value"] for other in payloads("log_other")}
    assert others["Name"] == "first"
    parameters = {
        p["param"]["paramName"]: p["param"]["paramValue"] for p in payloads("parameter_msg")
    }
    assert parameters["train.train_iters"] == "10"
    metrics = {}
    for payload in payloads("metric_msg"):
        metric = payload["metric"]
        metrics.setdefault(metric["metricName"], {})[metric["step"]] = float(metric["metricValue"])
    losses = metrics["lm loss"]
    assert list(losses) == [2, 4, 6, 8, 10]
    assert math.isnan(losses.pop(6))
    assert losses == {2: 0.5, 4: 1.0, 8: 2.0, 10: 2.5}
    assert metrics["samples vs steps"] == {2: 4, 4: 8, 6: 12, 8: 16, 10: 20}
    assert metrics["batch-size"] == dict.fromkeys((2, 4, 6, 8, 10), 2)
