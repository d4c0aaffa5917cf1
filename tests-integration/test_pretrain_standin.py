"""The main job on the stand-in accelerator: its losses are those of the CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layouts.reference import PlainGPT, train_plain
from pretrain.corpus import load_corpus
from pretrain.settings import Settings
from pretrain_runs import SMALL, curve_of, losses_of, train_on_ranks
from standin.guard import find_problem

pytestmark = pytest.mark.skipif(
    find_problem() is not None, reason=f"no stand-in accelerator: {find_problem()}"
)

# An accelerator sums the norm of gradients in another order: for equal bits nothing is clipped.
STEPS = {**SMALL, "train_iters": 3, "clip_grad": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"dp": 1, "recompute": True},
    "bf16": {"dp": 1, "bf16": True},
    "dp": {"dp": 2, "check_replicas_interval": 2, "async_save": True, "save_interval": 2},
    "tp": {"dp": 1, "tp": 2},
    "cp": {"dp": 1, "cp": 2},
    "pp": {"dp": 1, "pp": 2, "micro_batch_size": 2},
    "packed": {"dp": 1, "packed": True},
    "experts": {"dp": 2, "experts": 4, "ep": 2},
    "fsdp": {"dp": 2, "fsdp": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_equal_those_of_the_cpu(layout: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(**{**STEPS, **layout})
    for kind in ("cpu", "standin"):
        train_on_ranks(settings, tmp_path / kind, kind=kind)
    losses = losses_of(tmp_path / "cpu")
    if settings.bf16:  # LayerNorm is computed in fp32 on a CPU, in bfloat16 elsewhere
        losses = pytest.approx(losses, rel=1e-3)
    assert losses_of(tmp_path / "standin") == losses
    assert len(losses_of(tmp_path / "standin")) == settings.train_iters


@pytest.mark.parametrize("layout", ["one", "tp", "pp"])
def test_clipped_steps_are_those_of_float64(layout: str, tmp_path: Path) -> None:
    """The order of a norm's sum in fp32 changes the last bits of norms and losses, 1e-7 of them."""
    settings = Settings(**{**STEPS, **LAYOUTS[layout], "clip_grad": 0.02})
    train_on_ranks(settings, tmp_path, kind="standin")
    model, corpus = PlainGPT(settings).double(), load_corpus()
    losses, norms = train_plain(
        model, settings, lambda n: model.loss(corpus.training_batch(settings, slice(None), n))
    )
    assert min(norms) > settings.clip_grad
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-6)
    assert list(curve_of(tmp_path, "grad-norm").values()) == pytest.approx(norms, rel=1e-6)


def test_a_resumed_run_continues_as_one_without_a_break(tmp_path: Path) -> None:
    settings = Settings(**{**STEPS, "dp": 1, "async_save": True, "save_interval": 2})
    train_on_ranks(settings, tmp_path / "whole", kind="standin")
    halved = Settings(**{**STEPS, "dp": 1, "async_save": True, "exit_after": 2})
    train_on_ranks(halved, tmp_path / "broken", kind="standin")
    train_on_ranks(settings, tmp_path / "broken", kind="standin", resume=True)
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")
