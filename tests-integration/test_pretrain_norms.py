"""The norms that the main job logs are those of the whole model, in every layout."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mcore.parallel import ProcessGroups
from pretrain.corpus import draw_batch, load_corpus
from pretrain.model.building import build_model
from pretrain.model.configuration import transformer_config
from pretrain.settings import Settings
from pretrain_runs import SMALL as BASE
from pretrain_runs import curves_of, norm_of, train_on_ranks, whole_parameters
from rank_testing import run_ranks

SMALL = Settings(dp=1, log_interval=2, **{**BASE, "train_iters": 3, "save_interval": 2})


def gradient_norm_of_one_process(checkpoint: str, step: int) -> float:
    """The norm of the gradient that the whole model has for the batch of a step."""
    alone = dataclasses.replace(SMALL, tp=1, cp=1, dp=1)
    device = torch.device("cpu")
    model = build_model(alone, transformer_config(alone), ProcessGroups.from_sizes(), device)
    wanted = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in whole_parameters(Path(checkpoint)).items():
            wanted.pop(name).copy_(values)
    assert not wanted
    batch = draw_batch(load_corpus().train, alone, slice(None), alone.seed, step)
    logits = model(batch["tokens"], batch["position_ids"])
    labels = batch["labels"].transpose(0, 1)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return norm_of(param.grad for param in model.parameters())


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"dp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "dp": 2, "fsdp": True}],
    ids=["tp2", "dp2", "tp2-cp2", "tp2-fsdp2"],
)
def test_norms_are_those_of_the_whole_model(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, **layout)
    train_on_ranks(settings, tmp_path)
    curves = curves_of(tmp_path)
    assert list(curves["params-norm"]) == [2, 3]
    for step, norm in curves["params-norm"].items():
        whole = whole_parameters(tmp_path / "checkpoints" / f"step_{step:08d}")
        assert norm == pytest.approx(norm_of(whole.values()), rel=1e-6)
    before = str(tmp_path / "checkpoints" / "step_00000002")
    (expected,) = run_ranks(gradient_norm_of_one_process, 1, before, 3, timeout_s=600)
    assert curves["grad-norm"][3] == pytest.approx(expected, rel=1e-4)
    ranks = {name.split("/")[1] for name in curves if name.startswith("memory/")}
    assert Counter(ranks) == Counter(f"rank{rank}" for rank in range(settings.world_size))
    assert not (tmp_path / "tensorboard").exists()
    assert not list(tmp_path.glob("mlflow*"))
