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
from rank_testing.scripts import run_script

pytestmark = pytest.mark.needs("wandb")


def train(folder):
    import wandb

    os.chdir(folder)
    logger = LoggerConfig(
        log_interval=100,
        tensorboard_log_interval=2,
        closing_s=100.0,
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


def start_again_and_again(folder, wandb_records):
    """Train two steps past each checkpoint; return the number of whole files after each start."""
    import wandb

    os.chdir(folder)
    logger = {"log_interval": 100, "wandb_project": "pretraining", "wandb_exp_name": "x"}
    logger["closing_s"] = 100.0
    logger |= {"wandb_save_dir": str(folder), "tensorboard_log_interval": 1, "run_dir": str(folder)}
    kinds = []
    for first in (0, 4, 8, 12):
        resumed = {"resume_step": first} if first else {}
        config = ConfigContainer(logger=LoggerConfig(**logger, **resumed))
        for path in folder.glob("wandb/offline-run-*"):
            path.rename(f"{path}-{first}")  # the name that W&B gives a second run within a second
        with GlobalState(config, train_state=TrainState()) as state:
            for step in range(first + 1, first + 7):
                state.train_state.step = step
                state.log_metrics({"lm loss": torch.tensor(step / 4)})
        files = folder.glob("wandb/offline-run-*/run-*.wandb")
        kinds.append(
            [one.WhichOneof("record_type") for path in files for one in wandb_records(path)]
        )
    wandb.teardown()
    return [each.count("exit") for each in kinds]


def test_starts_within_a_second_lose_no_step_and_repeat_none(tmp_path, wandb_records, offline):
    (ends,) = run_ranks(
        start_again_and_again, 1, tmp_path, wandb_records,
        init=None, env=offline(tmp_path), timeout_s=300,
    )  # fmt: skip
    assert ends == [1, 2, 3, 4]  # a file is whole once its run is closed
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1
    records = [record for path in files for record in wandb_records(path)]
    steps = [r.history.step.num for r in records if r.WhichOneof("record_type") == "history"]
    assert sorted(steps) == list(range(1, 19))


def test_a_run_holds_its_settings_and_every_metric_with_its_step(tmp_path, wandb_records, offline):
    run_ranks(train, 1, tmp_path, init=None, env=offline(tmp_path), timeout_s=300)
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


@pytest.mark.parametrize(
    "ending", ["os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", "raise SystemExit(3)"]
)
def test_the_exit_code_of_a_run_is_that_of_its_process(tmp_path, wandb_records, offline, ending):
    env = {name: text for name, text in (os.environ | offline(tmp_path)).items() if text}
    done = run_script(
        "import os, signal, sys, time, torch\n"
        "from mcore.observe import RunLog\n"
        "with RunLog(sys.argv[1], wandb='pretraining', log_every=1, closing_s=100.0) as log:\n"
        "    log.log_step(torch.tensor(2.5))\n"
        "    log.tracker('wandb')\n"  # waits until it is open
        f"    {ending}\n",
        str(tmp_path), env=env, cwd=tmp_path,
    )  # fmt: skip
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    (end,) = (r.exit for r in wandb_records(path) if r.WhichOneof("record_type") == "exit")
    # A shell shows 128 + the signal's number for a process that a signal ended.
    assert end.exit_code == (128 - done.returncode if done.returncode < 0 else done.returncode)
    assert end.exit_code in (130, 3)
