"""torchtitan's optimizer container in a checkpoint: its state comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore.parallel.checkpoint import load_training_state, save_training_state


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    titan = pytest.importorskip("torchtitan.components.optimizer.optimizer")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    config = titan.default_adamw(lr=1e-2)
    config.implementation = "foreach"
    return model, titan.OptimizersContainer(config, model_parts=[model])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()


def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    (model, optimizer), (other, fresh) = make(0), make(1)
    train(model, optimizer, range(3))
    save_training_state(tmp_path / "a", model, optimizer, step=3)
    train(model, optimizer, range(3, 6))
    load_training_state(tmp_path / "a", other, fresh, unexpected="raise")
    train(other, fresh, range(3, 6))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_save_before_the_first_step_makes_none(tmp_path: Path) -> None:
    model, optimizer = make(0)
    before = [value.clone() for value in model.parameters()]
    save_training_state(tmp_path / "a", model, optimizer, step=0)
    assert not optimizer.optimizers[0].state
    assert all(map(torch.equal, before, model.parameters()))
