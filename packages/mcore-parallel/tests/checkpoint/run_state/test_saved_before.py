"""A checkpoint that an earlier version saved continues as it did then."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore.parallel.checkpoint import load_training_state

SAVED = Path(__file__).parent / "saved_before" / "step_3"


def make() -> tuple[torch.nn.Sequential, torch.optim.AdamW, torch.optim.lr_scheduler.ExponentialLR]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    first, last = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first, "lr": 0.1}, {"params": last, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_its_states_are_those_of_the_run_that_saved_it() -> None:
    model, optimizer, schedule = make()
    for step in range(3):
        optimizer.zero_grad()
        batch = torch.linspace(-1, 1, 12).view(4, 3) * (step + 1)
        model(batch).square().mean().backward()
        optimizer.step()
        schedule.step()
    other, fresh, fresh_schedule = make()
    found = load_training_state(
        SAVED, other, fresh, schedule=fresh_schedule, random_state=False, unexpected="raise"
    )
    assert found.keys() == {"step", "schedule", "ema", "note"}
    assert (found["step"], found["note"]) == (3, "old")
    assert torch.equal(found["ema"]["w"], torch.arange(4.0))
    assert fresh_schedule.state_dict() == schedule.state_dict()
    for one, two in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert {**one, "params": None} == {**two, "params": None}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        # Another CPU rounds other bits.
        torch.testing.assert_close(one, two)
        assert optimizer.state[one].keys() == fresh.state[two].keys()
        for field, value in optimizer.state[one].items():
            torch.testing.assert_close(value, fresh.state[two][field])
