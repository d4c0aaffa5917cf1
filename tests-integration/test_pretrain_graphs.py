"""The main job with layers that run from graphs gives the losses of the eager run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.settings import Settings
from pretrain_runs import SMALL as BASE
from pretrain_runs import curve_of, pretrain, train_here
from pretrain_worlds import train_all
from rank_testing import run_ranks

STEPS = 4
SMALL: dict[str, Any] = {**BASE, "train_iters": STEPS, "eval_interval": 2}


def train_repeatably_here(settings: Settings, run_dir: str) -> str:
    """One rank of the main job on a GPU, without the kernels that add up in a changing order."""
    with sdpa_kernel(SDPBackend.MATH):
        return train_here(settings, run_dir, kind="cuda")


EAGER = {
    "tp2-sequence-parallel": Settings(
        tp=2, dp=1, sequence_parallel=True, micro_batch_size=2, **SMALL
    ),
    "cp2-bf16": Settings(cp=2, dp=1, bf16=True, **SMALL),
    "dp2-untied": Settings(dp=2, untied=True, micro_batch_size=2, **SMALL),
    "tp2-value-head": Settings(tp=2, dp=1, value_head=True, **SMALL),
    "tp2-dropout": Settings(tp=2, dp=1, dropout=0.2, sequence_parallel=True, **SMALL),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of all runs, and what the last rank of each run with graphs has printed."""
    folder = tmp_path_factory.mktemp("runs")
    graphed = [
        (f"{name}/graphs", dataclasses.replace(one, cuda_graph="local"))
        for name, one in EAGER.items()
    ]
    train_all([(f"{name}/eager", one) for name, one in EAGER.items()], folder)
    printed = train_all(graphed, folder)
    return folder, dict(zip(EAGER, [of_ranks[-1] for of_ranks in printed], strict=True))


@pytest.mark.parametrize("name", EAGER)
def test_losses_are_those_of_the_eager_run_bit_for_bit(
    name: str, runs: tuple[Path, dict[str, str]]
) -> None:
    folder, printed = runs[0] / name, runs[1][name]
    loss = "value loss" if EAGER[name].value_head else "lm loss"
    for metric in (loss, f"{loss} validation"):
        eager, graphs = (curve_of(folder / run, metric) for run in ("eager", "graphs"))
        assert eager == graphs
    assert list(curve_of(folder / "graphs", loss)) == list(range(1, STEPS + 1))
    # Not eager after all: each layer has its graph, used one micro-batch after the other.
    assert re.search(r"^graphs +2 for 2 layers, by the eager runner$", printed, re.MULTILINE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures layers on a CUDA device")
@pytest.mark.parametrize(("bf16", "dropout"), [(False, 0.0), (True, 0.0), (False, 0.2)])
def test_on_a_gpu_losses_are_those_of_the_eager_run(
    bf16: bool, dropout: float, tmp_path: Path
) -> None:
    """Checks the main job's losses with real graphs against those without, on one GPU."""
    more = {"train_iters": 20, "dropout": dropout}
    settings = Settings(dp=1, bf16=bf16, micro_batch_size=2, **{**SMALL, **more})
    graphed = dataclasses.replace(settings, cuda_graph="local")
    for run, one in (("eager", settings), ("graphs", graphed)):
        run_dir = str(tmp_path / run)
        [printed] = run_ranks(train_repeatably_here, 1, one, run_dir, timeout_s=300, init="nccl")
    eager, graphs = (curve_of(tmp_path / run, "lm loss") for run in ("eager", "graphs"))
    assert eager == graphs
    assert "2 for 2 layers, by the torch runner" in printed


def test_a_run_with_dropout_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """The streams that graphs advance are saved and put back."""
    settings = Settings(dp=1, dropout=0.2, cuda_graph="local", **SMALL)
    halved = dataclasses.replace(settings, exit_after=2)
    train_all([("whole", settings), ("parts", halved), ("parts", settings)], tmp_path)
    whole, parts = (curve_of(tmp_path / run, "lm loss") for run in ("whole", "parts"))
    assert list(whole) == list(range(1, STEPS + 1))
    assert parts == whole


REFUSED = {
    "fsdp": (["--fsdp"], "--cuda-graph cannot work with --fsdp"),
    "kind": (["--cuda-graph", "full"], "argument --cuda-graph: invalid choice: 'full'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_graphs_cannot_do_is_refused_in_one_line(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = pretrain(tmp_path, "--cuda-graph", "local", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pretrain: error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
