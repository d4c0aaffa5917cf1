"""Runs of the main job that continue with other settings, or begin with the weights of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.cli.options import parse, resolve
from pretrain.corpus import load_corpus
from pretrain.run.schedule import learning_rate_at
from pretrain.run_folder import RunFolder
from pretrain.sample import load_model
from pretrain.settings import Settings, write_settings
from pretrain.usage import UsageError
from pretrain_runs import (
    SMALL,
    TINY,
    curve_of,
    last_value,
    losses_of,
    pretrain,
    records_of,
    seen_here,
    train_on_ranks,
    whole_parameters,
)
from rank_testing import run_ranks

QUIET = (*TINY, "--no-mlflow", "--no-tensorboard", "--no-straggler")


def test_each_schedule_by_hand() -> None:
    one = Settings(lr=1.0, min_lr=0.2, warmup_iters=4, train_iters=24)
    rates = {
        "cosine": {2: 0.5, 4: 1.0, 14: 0.6, 9: 0.6 + 0.4 * math.sqrt(0.5), 24: 0.2, 30: 0.2},
        "linear": {2: 0.5, 4: 1.0, 14: 0.6, 9: 0.8, 24: 0.2, 30: 0.2},
        "constant": {2: 0.5, 4: 1.0, 14: 1.0, 24: 1.0, 30: 1.0},
        "wsd": {2: 0.5, 4: 1.0, 14: 1.0, 16: 1.0, 20: 0.6, 24: 0.2, 30: 0.2},
    }
    for name, expected in rates.items():
        of = dataclasses.replace(one, lr_schedule=name, lr_wsd_decay_iters=8)  # type: ignore
        found = {step: learning_rate_at(of, step) for step in expected}
        assert found == pytest.approx(expected, rel=1e-12), name
    a_fifth = dataclasses.replace(one, lr_schedule="wsd", lr_decay_iters=40)
    assert [learning_rate_at(a_fifth, step) for step in (32, 36, 40)] == pytest.approx(
        [1, 0.6, 0.2]
    )


def test_a_longer_run_keeps_its_schedule_and_says_what_its_rate_does(tmp_path: Path) -> None:
    options = [*QUIET, "--train-iters", "6", "--run-dir", "run"]
    done = pretrain(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert last_value(done.stdout, "learning rate") == (
        "cosine: 0.0015 at step 1, 0.003 at step 2, 0.0003 at step 6"
    )
    printed = last_value(done.stdout, "continue").split()[3:]
    assert printed == ["--resume", "run", "--train-iters", "12"]
    longer = pretrain(tmp_path, *printed)
    assert longer.returncode == 0, longer.stderr
    said = "cosine: 0.0003 at step 7, 0.0003 at step 12"
    assert last_value(longer.stdout, "learning rate") == said
    rates = curve_of(tmp_path / "run", "learning-rate")
    assert list(rates.values())[5:] == pytest.approx([3e-4] * 7)


def test_what_can_change_changes_and_is_recorded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = pretrain(tmp_path, *QUIET, "--train-iters", "3", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    changes = {
        "lr": 1e-3, "min_lr": 1e-3, "lr_schedule": "linear", "lr_decay_iters": 9, "warmup_iters": 1,
        "weight_decay": 0.5, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6,
        "clip_grad": 0.5, "dropout": 0.25, "global_batch_size": 4, "micro_batch_size": 1,
        "save_interval": 5, "log_interval": 2, "train_iters": 5,
    }  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    done = pretrain(tmp_path, "--resume", "run", *words)
    assert done.returncode == 0, done.stderr
    config = json.loads((run / "config.json").read_text())
    [entry] = config["history"]
    assert entry["step"] == 3
    assert {name: new for name, (_, new) in entry["changes"].items()} == changes
    assert config["settings"].items() >= changes.items()
    for name, (old, new) in entry["changes"].items():
        line = f"pretrain: from step 4 on --{name.replace('_', '-')} is {new}, before {old}\n"
        assert line in done.stderr
    assert "gradients accumulated over 2 micro-batches" in done.stdout
    assert list(curve_of(run, "learning-rate").values())[3:] == pytest.approx([1e-3, 1e-3])
    assert [r["batch-size"] for r in records_of(run) if "batch-size" in r] == [8, 8, 8, 4, 4]

    again = pretrain(tmp_path, "--resume", "run", "--train-iters", "6")
    assert again.returncode == 0, again.stderr
    history = json.loads((run / "config.json").read_text())["history"]
    assert history[0] == entry
    assert history[1] == {"step": 5, "changes": {"train_iters": [5, 6]}}


def test_what_cannot_change_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_settings(Settings(data="books", packed=True), tmp_path, [])
    text, weights = "its place in the text depends on it", "its weights depend on it"
    for words, reason in {
        "--hidden-size 64": weights, "--experts 4": weights, "--bf16": weights,
        "--seed 7": "the order of its text depends on it", "--field body": text,
        "--no-packed": text, "--seq-length 64": text, "--data=": text,
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            resolve(parse(["--resume", str(tmp_path), *words.split()]), None)
    reset = ["--resume", str(tmp_path), "--reset-data", "--data=", "--no-packed"]
    settings = resolve(parse([*reset, "--seq-length", "64"]), None).settings
    assert (settings.data, settings.packed, settings.seq_length) == ("", False, 64)
    for words, problem in (
        (["--reset-data"], "--reset-data needs --resume"),
        (["--resume", str(tmp_path), "--init-from", "x"], "--init-from is for a new run"),
        (["--eval-only"], "--eval-only needs weights: pass --init-from"),
    ):
        with pytest.raises(UsageError, match=problem):
            resolve(parse(words), None)


def test_another_batch_size_continues_in_the_text_and_a_reset_begins_it(tmp_path: Path) -> None:
    numbers = b"".join(number.to_bytes(2, "big") for number in range(1, 1215))
    for name in ("text.bin", "other.bin"):
        (tmp_path / name).write_bytes(numbers)
    split = int(len(numbers) * 0.95)
    windows = [list(numbers[at : at + 32]) for at in range(0, split - 32, 32)]
    shape = {**SMALL, "num_layers": 1, "data": str(tmp_path / "text.bin"), "dp": 1}
    first = Settings(**shape | {"exit_after": 5})
    second = dataclasses.replace(first, global_batch_size=4, train_iters=13, exit_after=0)
    seen = []
    for number, settings in enumerate((first, second)):
        [rows] = run_ranks(seen_here, 1, settings, str(tmp_path / "run"), resume=number > 0)
        seen += rows
    assert len(seen) == 5 * 8 + 8 * 4
    assert sorted(seen) == sorted(windows)

    other = dataclasses.replace(second, data=str(tmp_path / "other.bin"), train_iters=15)
    reset = dataclasses.replace(other, reset_data=True)
    [rows] = run_ranks(seen_here, 1, reset, str(tmp_path / "run"), resume=True)
    assert rows == seen[: 2 * 4]
    # As if it had been killed before its first checkpoint: its config.json has the choice.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000015")
    for last, expected in ((15, seen[: 2 * 4]), (16, seen[2 * 4 : 3 * 4])):
        more = dataclasses.replace(other, train_iters=last)
        [rows] = run_ranks(seen_here, 1, more, str(tmp_path / "run"), resume=True)
        assert rows == expected
    history = json.loads((tmp_path / "run" / "config.json").read_text())["history"]
    assert [one["step"] for one in history if "reset_data" in one["changes"]] == [13, 13]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that others take their weights from."""
    folder = tmp_path_factory.mktemp("source")
    train_on_ranks(Settings(**{**SMALL, "train_iters": 3}, dp=2), folder)
    return folder


@pytest.mark.parametrize("layout", [{"dp": 1}, {"tp": 2, "dp": 1, "bf16": True}, {"fsdp": True}])
def test_a_run_begins_with_the_weights_of_another(
    layout: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    start = Settings(**{**SMALL, **layout, "lr": 0.0, "min_lr": 0.0, "train_iters": 1},
                     init_from=str(source))  # fmt: skip
    train_on_ranks(start, tmp_path / "new")
    before, after = (
        whole_parameters(next((run / "checkpoints").iterdir()))
        for run in (source, tmp_path / "new")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].float(), tensor.to(after[name].dtype).float()), name
    assert list(curve_of(tmp_path / "new", "lm loss")) == [1]


def test_other_sizes_are_refused_with_both_numbers(tmp_path: Path) -> None:
    done = pretrain(tmp_path, *QUIET, "--train-iters", "1", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    source = ["--init-from", "run/checkpoints/step_00000001", "--run-dir", "new"]
    refused = pretrain(tmp_path, *QUIET, *source, "--hidden-size", "64")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "its --hidden-size is 32, this run's 64" in refused.stderr
    for wrong in ("nowhere", "run/checkpoints", "run/checkpoints/step_00000009"):
        nowhere = pretrain(tmp_path, *QUIET, "--init-from", wrong, "--run-dir", "new")
        assert f"--init-from {tmp_path / wrong}: neither a run nor a complete" in nowhere.stderr
    assert not (tmp_path / "new").exists()

    text = "the cat sat on the mat. " * 40
    (tmp_path / "text.txt").write_text(text)
    options = [*source, "--eval-only", "--data", "text.txt", "--validation-share", "0.9"]
    done = pretrain(tmp_path, *QUIET, *options, "--train-iters", "2")
    assert done.returncode == 0, done.stderr
    [measured] = curve_of(tmp_path / "new", "lm loss validation").values()
    assert last_value(done.stdout, "validation loss") == f"{measured:.3f} nats per byte"
    assert not (tmp_path / "new" / "checkpoints").exists()
    printed = last_value(done.stdout, "start again").split()[3:]
    assert printed == ["--config", "new/config.json"]
    tuned = pretrain(tmp_path, *printed, "--run-dir", "tuned")
    assert tuned.returncode == 0, tuned.stderr
    assert losses_of(tmp_path / "tuned")[0] == pytest.approx(measured, abs=0.5)
    settings = Settings(**json.loads((tmp_path / "new" / "config.json").read_text())["settings"])
    corpus = load_corpus()
    corpus = dataclasses.replace(
        corpus, validation=torch.tensor(list(text[int(len(text) * (1 - 0.9)) :].encode()))
    )
    batch = corpus.validation_batch(settings, slice(0, 8), 0)
    model = load_model(dataclasses.replace(settings, dp=1), RunFolder(tmp_path / "run"))
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"])[..., :256].permute(1, 2, 0)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    assert float(loss) == pytest.approx(measured, rel=1e-4)


def test_a_run_whose_last_steps_diverge_says_so_and_prints_a_command_that_works(
    tmp_path: Path,
) -> None:
    away = ["--lr", "1e30", "--min-lr", "1", "--warmup-iters", "0", "--train-iters", "3"]
    done = pretrain(tmp_path, *QUIET, *away, "--save-interval", "1", "--run-dir", "run")
    assert done.returncode == 4
    assert last_value(done.stdout, "diverged") == "the gradients of 2 last steps were not finite"
    assert "2 steps in a row, to step 3, were not finite" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]
    assert (tmp_path / "run" / "loss.png").exists()
    printed = last_value(done.stdout, "continue").split()[3:]
    # 1e29 diverges too: the command is accepted, and a rate that a user chooses works.
    assert printed == ["--resume", "run", "--lr", "1e+29", "--min-lr", "0.1"]
    assert done.stderr.rstrip().endswith(f"Continue with: hatch run pretrain {' '.join(printed)}")
    assert pretrain(tmp_path, *printed).returncode == 4
    assert losses_of(tmp_path / "run")[0] > 0

    none = pretrain(tmp_path, *QUIET, *away, "--save-interval", "0", "--run-dir", "none")
    assert none.returncode == 4
    again = last_value(none.stdout, "start again").split()[3:]
    assert again[:2] == ["--config", "none/config.json"]
    fine = pretrain(tmp_path, *again, "--lr", "1e-3", "--min-lr", "1e-3", "--run-dir", "fine")
    assert fine.returncode == 0, fine.stderr
