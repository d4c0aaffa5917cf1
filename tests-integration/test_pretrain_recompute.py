"""Recomputed activations in the main job: the same losses, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain_runs import SMALL, losses_of, pretrain, train_on_ranks


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp": 1},
        {"tp": 2, "dp": 1, "sequence_parallel": True, "bf16": True},
        {"dp": 2, "fsdp": True, "micro_batch_size": 2},
    ],
    ids=["tp2", "tp2-sequence-bf16", "dp2-fsdp"],
)
def test_with_dropout_in_all_streams_nothing_changes(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    losses = []
    for recompute in (False, True):
        folder = RunFolder(tmp_path / str(recompute))
        settings = Settings(**SMALL, **layout, dropout=0.3, recompute=recompute)
        train_on_ranks(settings, folder.path)
        losses.append(losses_of(folder.path))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 8


def test_graphs_keep_what_recomputation_does_not(tmp_path: Path) -> None:
    done = pretrain(tmp_path, "--recompute", "--cuda-graph", "local")
    assert done.returncode == 2
    assert "--cuda-graph cannot work with --recompute, which discards" in done.stderr
