"""Where the main job's settings come from, and whether what it prints of a run is true."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from layouts.reference import plain_run
from pretrain.corpus import Corpus
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.summary import Summary, opening_lines
from pretrain_runs import SMALL, curve_of, last_value, losses_of, pretrain, train_on_ranks

LABELS = ["run folder", "loss", "validation loss", "speed", "slow ranks"]
LABELS += ["loss curve", "run page", "continue"]


def test_settings_come_from_a_file_and_options_override_them(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(
        "num-layers = 1\nhidden_size = 32\nseq-length = 32\nglobal-batch-size = 8\nlr = 1\n"
        "train-iters = 9\ntp = 2\nmlflow = false\ntensorboard = false\nquiet = true\n"
    )
    done = pretrain(tmp_path, "--config", "tiny.toml", "--train-iters", "3", "--run-dir", "one")
    assert done.returncode == 0, done.stderr
    assert [line[:17].strip() for line in done.stdout.strip().splitlines()] == LABELS
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    settings = Settings(**stored["settings"])
    assert (settings.tp, settings.dp, settings.hidden_size, settings.train_iters) == (2, 1, 32, 3)
    assert (settings.lr, settings.tensorboard) == (1.0, False)
    assert stored["started_with"]["torch"].startswith("2.")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", stored["started_with"]["commit"])

    again = pretrain(tmp_path, "--config", "one/config.json", "--run-dir", "two")
    assert again.returncode == 0, again.stderr
    assert losses_of(tmp_path / "two") == losses_of(tmp_path / "one")
    opening = {label: last_value(again.stdout, label) for label in ("model", "layout", "data")}
    assert opening["model"].endswith("fp32: 1 layer of 32, 4 heads")
    assert opening["layout"].startswith("tp2-cp1-dp1 on 2 ranks")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden-size = 3", "unknown settings: hiden_size"),
        ("tp = 2.5", "tp is 2.5, not of type int"),
        ("num_layers = 1\nnum-layers = 2", "num-layers is set twice, with _ and with -"),
        ("tp = = 2", "--config x.toml: Invalid value"),
        ("topk = 3", "--topk 3 has no effect without --experts"),
        ("lr_wsd_decay_iters = 3", "3 has no effect without --lr-schedule wsd"),
        ("cuda_graph = 'loc'", "--cuda-graph must be one of none, local, got loc"),
        ("experts = 2\nbalance = 'all'", "--balance must be one of batch, sequence, got all"),
        ("tp = 3", "--num-attention-heads 4 is not divisible by --tp 3"),
        (None, "--config x.toml: No such file"),
    ],
)
def test_a_settings_file_that_cannot_be_used(
    text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "x.toml").write_text(text)
    done = pretrain(tmp_path, "--config", "x.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_settings_in_a_pipe_or_a_folder_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("pipe.toml", "."):
        done = pretrain(tmp_path, "--config", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--config {name}: not a regular file. Pass a regular file" in done.stderr


def test_validation_is_of_the_text_that_is_not_trained_on(tmp_path: Path) -> None:
    settings = Settings(dp=1, **SMALL | {"lr": 1e-2, "eval_batches": 3})
    train_on_ranks(settings, tmp_path)
    losses, validation = plain_run(settings)
    assert losses_of(tmp_path) == pytest.approx(losses, rel=2e-5)
    [measured] = curve_of(tmp_path, "lm loss validation").values()
    assert measured == pytest.approx(validation, rel=2e-5)
    assert abs(measured - losses[-1]) > 1e-3


def test_the_closing_figures_leave_out_how_the_run_started(tmp_path: Path) -> None:
    folder, settings = RunFolder(tmp_path / "a run"), Settings(log_interval=2)
    folder.path.mkdir()  # 16 x 128 tokens a step
    losses = (9.0, 4.0, 3.0, 2.0)
    folder.metrics.write_text(
        "".join(f'{{"step": {step}, "lm loss": {x}}}\n' for step, x in enumerate(losses, 1))
    )
    summary = Summary(folder, settings, first_step=0)
    summary.seconds, summary.validation = [30.0, 0.5, 0.5, 0.25, 0.5], 2.25

    class Unwatched:
        """No detector ran."""

        def summary(self) -> None:
            """Nothing was found."""

    text = "\n".join(summary.lines(None, Unwatched()))  # type: ignore[arg-type]
    one = Summary(folder, Settings(log_interval=1), first_step=4)
    assert "over the last 1 step (" in "\n".join(one.lines(None, Unwatched()))  # type: ignore
    assert last_value(text, "speed") == "4,096 tokens per second (500.0 ms a step)"
    assert last_value(text, "loss") == (
        "9.000 at step 1, 2.500 over the last 2 steps (nats per byte)"
    )
    typed = shlex.split(last_value(text, "continue"))
    assert typed == ["hatch", "run", "pretrain", "--resume", str(folder.path)]
    speeds: dict[tuple[float, ...], str] = {
        (30.0, 0.5): "4,096 tokens per second (500.0 ms a step)"
    }
    speeds[(2.0,)] = "1,024 tokens per second (2000.0 ms a step, including the start of the run)"
    for seconds, speed in speeds.items():
        summary.seconds = list(seconds)
        text = "\n".join(summary.lines(None, Unwatched()))  # type: ignore[arg-type]
        assert last_value(text, "speed") == speed


def test_the_opening_lines_count_in_english() -> None:
    corpus, folder = Corpus(np.zeros(9, np.uint8), np.zeros(9, np.uint8), 0), RunFolder(Path("run"))
    sizes = {"dp": 1, "num_layers": 1, "num_attention_heads": 1, "global_batch_size": 1}
    one = Settings(**sizes, experts=1, topk=1)
    model, layout, *_ = opening_lines(one, 10_000, corpus, torch.device("cpu"), folder)
    assert model.endswith("1 layer of 128, 1 head, 1 expert, 1 for each token")
    assert layout.endswith(" on 1 rank, a global batch of 1 x 128, 1 sequence a rank at once")
    _, layout, *_ = opening_lines(Settings(), 10_000, corpus, torch.device("cpu"), folder)
    assert layout.endswith(" on 2 ranks, a global batch of 16 x 128, 8 sequences a rank at once")


def test_the_opening_line_says_how_long_a_short_text_is() -> None:
    text = np.zeros(2_000_000, np.uint8)
    assert Corpus(text[:1_234], text[:16], 0).description == (
        "1,234 bytes to train on, 16 bytes to validate"
    )
    assert Corpus(text, text[:99_999], 0, "tokens").description == (
        "2.0 M tokens to train on, 99,999 tokens to validate"
    )
    assert Corpus(text, text[:100_000], 0).description == "2.0 MB to train on, 0.1 MB to validate"
