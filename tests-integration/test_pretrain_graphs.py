"""The main job with layers that run from graphs gives the losses of the eager run."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrain.cli.command import main
from pretrain.run.training import train
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from rank_testing import run_ranks

STEPS = 6
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "train_iters": STEPS,
    "global_batch_size": 8,
    "warmup_iters": 2,
    "eval_interval": 3,
    "eval_batches": 1,
    "save_interval": 0,
}


def train_here(settings: Settings, run_dir: str, kind: str) -> str:
    """One rank of the main job, in a process group that exists; returns what it printed."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
    # The quicker kernels add up gradients in an order that changes from run to run.
    repeatable = sdpa_kernel(SDPBackend.MATH) if kind != "cpu" else contextlib.nullcontext()
    with repeatable, contextlib.redirect_stdout(io.StringIO()) as printed:
        train(settings, RunFolder(Path(run_dir)), device, resume=None)
    return printed.getvalue()


def metrics_of(run_dir: Path, name: str) -> dict[int, float]:
    """A metric of each step that has it, from the run's JSONL file."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[name] for record in records if name in record}


@pytest.mark.parametrize(
    "settings",
    [
        Settings(tp=2, dp=1, sequence_parallel=True, micro_batch_size=2, **SMALL),
        Settings(cp=2, dp=1, bf16=True, **SMALL),
        Settings(dp=2, untied=True, micro_batch_size=2, **SMALL),
        Settings(tp=2, dp=1, value_head=True, **SMALL),
    ],
    ids=["tp2-sequence-parallel", "cp2-bf16", "dp2-untied", "tp2-value-head"],
)
def test_losses_are_those_of_the_eager_run_bit_for_bit(settings: Settings, tmp_path: Path) -> None:
    run_ranks(train_here, 2, settings, str(tmp_path / "eager"), "cpu", timeout_s=120)
    graphed = dataclasses.replace(settings, cuda_graph="local")
    printed = run_ranks(train_here, 2, graphed, str(tmp_path / "graphs"), "cpu", timeout_s=120)
    loss = "value loss" if settings.value_head else "lm loss"
    for name in (loss, f"{loss} validation"):
        eager, graphs = (metrics_of(tmp_path / run, name) for run in ("eager", "graphs"))
        assert eager == graphs
    assert list(metrics_of(tmp_path / "graphs", loss)) == list(range(1, STEPS + 1))
    # Not eager after all: each layer has its graph, used one micro-batch after the other.
    assert re.search(r"^graphs +2 for 2 layers, by the eager runner$", printed[-1], re.MULTILINE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures layers on a CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_gpu_losses_are_those_of_the_eager_run(bf16: bool, tmp_path: Path) -> None:
    """Checks the main job's losses with real graphs against those without, on one GPU."""
    settings = Settings(dp=1, bf16=bf16, micro_batch_size=2, **{**SMALL, "train_iters": 20})
    graphed = dataclasses.replace(settings, cuda_graph="local")
    for run, one in (("eager", settings), ("graphs", graphed)):
        run_dir = str(tmp_path / run)
        [printed] = run_ranks(train_here, 1, one, run_dir, "cuda", timeout_s=300, init="nccl")
    eager, graphs = (metrics_of(tmp_path / run, "lm loss") for run in ("eager", "graphs"))
    assert eager == graphs
    assert "2 for 2 layers, by the torch runner" in printed


REFUSED = {
    "fsdp": (["--fsdp"], "--cuda-graph local cannot work with --fsdp"),
    "dropout": (["--dropout", "0.1"], "--cuda-graph local cannot work with --dropout 0.1"),
    "kind": (["--cuda-graph", "full"], "argument --cuda-graph: invalid choice: 'full'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_graphs_cannot_do_is_refused_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--cuda-graph", "local", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pretrain: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []
