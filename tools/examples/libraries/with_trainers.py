"""Trainers of other libraries: ``hatch run examples``, in an environment with all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from mcore.parallel.checkpoint import (
    latest_checkpoint,
    load_sharded_state_dict,
    load_training_state,
)

EXAMPLES = Path(__file__).parents[1]


def run(file: str, folder: Path, *words: str, ranks: int = 0) -> str:
    """Run an example as in its docstring. Returns its output."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(EXAMPLES / file), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def test_transformers_logs_what_its_trainer_logs_and_goes_on(tmp_path: Path) -> None:
    run("hf_trainer.py", tmp_path, "--steps", "10")
    run("hf_trainer.py", tmp_path, "--steps", "20")
    kept = tmp_path / "checkpoints" / "checkpoint-20" / "trainer_state.json"
    history = json.loads(kept.read_text())["log_history"]
    logged = curve(tmp_path, "loss")
    assert list(logged) == [5, 10, 15, 20]
    assert logged == {one["step"]: one["loss"] for one in history if "loss" in one}
    assert logged[20] < logged[5] / 2
    assert curve(tmp_path, "samples vs steps") == {step: 8 * step for step in logged}


def test_lightning_logs_losses_and_what_the_module_logs_and_goes_on_with_two(
    tmp_path: Path,
) -> None:
    run("lightning_fit.py", tmp_path, "--steps", "40")
    run("lightning_fit.py", tmp_path, "--steps", "60", "--devices", "2")
    losses, largest = curve(tmp_path, "loss"), curve(tmp_path, "largest error")
    assert list(losses) == list(largest) == [10, 20, 30, 40, 50, 60]
    assert losses[60] < losses[10] / 2
    assert all(largest[step] ** 2 >= losses[step] for step in (10, 20, 30, 40))
    assert curve(tmp_path, "samples vs steps")[60] == 40 * 32 + 20 * 64
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 60


def test_a_gpt_of_megatron_core_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run("megatron_core.py", tmp_path / "both", "--steps", "10", ranks=2)
    at_10 = latest_checkpoint(tmp_path / "both" / "checkpoints")
    assert at_10 is not None
    table = {"embedding.word_embeddings.weight": torch.zeros(64, 32)}
    load_sharded_state_dict(table, at_10, unexpected="ignore")
    run("megatron_core.py", tmp_path / "both", "--steps", "20", ranks=1)
    run("megatron_core.py", tmp_path / "one", "--steps", "20", ranks=1)
    found, alone = (curve(tmp_path / name, "lm loss") for name in ("both", "one"))
    assert list(found) == list(alone) == [10, 20]
    torch.testing.assert_close([*found.values()], [*alone.values()], rtol=1e-3, atol=0)
    assert found[20] < found[10]
    assert table.popitem()[1].abs().sum() > 0


def test_ray_trains_on_two_workers_and_names_the_slow_one(tmp_path: Path) -> None:
    printed = run("ray_workers.py", tmp_path, "--steps", "40", "--slow-rank", "1")
    assert re.search(r"slow ranks: \[.*\b1\b", printed), printed
    losses = curve(tmp_path, "loss")
    assert list(losses) == [10, 20, 30, 40]
    assert losses[40] < losses[10]
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    load_training_state(tmp_path / "checkpoints" / "step_40", model, unexpected="ignore")
    inputs = torch.rand(1000, 1) * 6
    assert (model(inputs) - inputs.sin()).square().mean() < losses[10]


def test_torchtitan_s_trainer_names_the_slow_rank_and_goes_on_with_equal_losses(
    tmp_path: Path,
) -> None:
    printed = run("titan_trainer.py", tmp_path / "all", "--slow-rank", "1", ranks=2)
    assert re.search(r"slow ranks: \[.*\b1\b", printed), printed
    losses = curve(tmp_path / "all", "loss")
    assert list(losses) == [1, 5, 10, 15, 20]
    assert losses[20] < losses[1] / 2
    assert 7 < losses[1] < 9  # of 2,048 equal chances: ln 2048 = 7.6
    at_10 = Path("checkpoints", "step_10")
    shutil.copytree(tmp_path / "all" / at_10, tmp_path / "rest" / at_10)
    run("titan_trainer.py", tmp_path / "rest", ranks=2)
    assert curve(tmp_path / "rest", "loss") == {step: losses[step] for step in (15, 20)}
