"""A training run that logs to Weights & Biases offline, read back from the run's file."""

import json
import math
import os

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

pytestmark = pytest.mark.needs("wandb")


def train(folder):
    import wandb

    os.chdir(folder)
    logger = LoggerConfig(
        log_interval=100,
        tensorboard_log_interval=2,
        wandb_project="pretraining",
        wandb_exp_name="first",
        wandb_save_dir=str(folder),
    )
    config = ConfigContainer(
        logger=logger, train=TrainingConfig(micro_batch_size=2, train_iters=10)
    )
    with GlobalState(config, train_state=TrainState()) as state:
        for step in range(1, 11):
            state.train_state.step = step
            state.train_state.consumed_train_samples = 2 * step
            loss = torch.tensor(math.nan if step == 6 else step / 4)
            training_log(
                {"lm loss": loss}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
                config, state, None, None,
            )  # fmt: skip
            if step == 8:
                state.log_metrics({"lm loss validation": torch.tensor(2.5)})
    wandb.teardown()


def test_a_run_holds_its_settings_and_every_metric_with_its_step(tmp_path, wandb_records, offline):
    run_ranks(train, 1, tmp_path, init=None, env=offline(tmp_path), timeout_s=120)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("pretraining", "first")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["train.train_iters"] == "10"
    rows = {
        record.history.step.num: {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    }
    assert list(rows) == [2, 4, 6, 8, 10]
    assert [rows[step]["lm loss"] for step in (2, 4, 8, 10)] == [0.5, 1.0, 2.0, 2.5]
    assert math.isnan(float(rows[6]["lm loss"]))
    assert [row["samples vs steps"] for row in rows.values()] == [4, 8, 12, 16, 20]
    assert {row["batch-size"] for row in rows.values()} == {2}
    assert rows[8]["lm loss validation"] == 2.5  # of the same step, in a further call
    assert any(record.WhichOneof("record_type") == "exit" for record in records)
