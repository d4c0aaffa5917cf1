"""Recomputed activations in the main job: the same losses, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.settings import Settings
from pretrain_runs import SMALL, losses_of, pretrain
from pretrain_worlds import train_all

STEPS: dict[str, Any] = {**SMALL, "train_iters": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "dp": 1},
    "tp2-sequence-bf16": {"tp": 2, "dp": 1, "sequence_parallel": True, "bf16": True},
    "dp2-fsdp": {"dp": 2, "fsdp": True, "micro_batch_size": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of each layout."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = [
        (f"{name}/{recompute}", Settings(**STEPS, **layout, dropout=0.3, recompute=recompute))
        for name, layout in LAYOUTS.items()
        for recompute in (False, True)
    ]
    train_all(jobs, folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_with_dropout_in_all_streams_nothing_changes(name: str, runs: Path) -> None:
    kept, recomputed = (losses_of(runs / name / str(recompute)) for recompute in (False, True))
    assert kept == recomputed
    assert len(set(kept)) == STEPS["train_iters"]


def test_graphs_keep_what_recomputation_does_not(tmp_path: Path) -> None:
    done = pretrain(tmp_path, "--recompute", "--cuda-graph", "local")
    assert done.returncode == 2
    assert "--cuda-graph cannot work with --recompute, which discards" in done.stderr
