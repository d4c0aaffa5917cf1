"""The plain loop on two ranks and then on one, and the value model, against plain PyTorch."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from examples import plain_loop, rl_value_model
from mcore.parallel.checkpoint import load_training_state
from rank_testing.programs import run_program


def curve(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def plainly_trained(steps: int) -> tuple[nn.Module, list[float]]:
    """Return the model of the loop after some steps without any of the packages, and its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(1, steps + 1):
        inputs = torch.rand(32, 1, generator=torch.Generator().manual_seed(step)) * 6
        loss = nn.functional.mse_loss(model(inputs), inputs.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


class SteadyTanh(nn.Tanh):
    """A layer that takes 20 ms, next to which the wait for a core of a busy machine is short."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(values)


def slow_loop(words: list[str]) -> int:
    """The loop with equal, known times of the forward pass but for those of the slow rank."""
    longer = SimpleNamespace(sleep=lambda _: time.sleep(0.1))
    with mock.patch.object(plain_loop, "time", longer), mock.patch.object(nn, "Tanh", SteadyTanh):
        return plain_loop.main(words)


def test_a_plain_loop_of_two_ranks_goes_on_as_one_and_names_the_slow_rank(tmp_path: Path) -> None:
    words = [str(tmp_path), "--steps"]
    two = run_program(slow_loop, [*words, "40", "--slow-rank", "1"], 2)
    one = run_program(plain_loop.main, [*words, "60"], 1)
    assert two.exit_codes == [0, 0], two.stderr
    assert one.exit_codes == [0], one.stderr
    # A busy machine may leave the last report, which is printed, without a verdict.
    assert "straggler: rank 1 (" in two.stderr, two.stderr
    assert "slow ranks: none" in one.stdout

    model, losses = plainly_trained(60)
    logged = curve(tmp_path, "loss")
    assert list(logged) == [10, 20, 30, 40, 50, 60]
    at_steps = [losses[step - 1] for step in logged]
    torch.testing.assert_close([*logged.values()], at_steps, rtol=1e-4, atol=0)
    assert curve(tmp_path, "samples vs steps") == {step: 32 * step for step in logged}
    shown = [float(number) for number in re.findall(r"\| loss: (\S+)", two.stdout + one.stdout)]
    means = [sum(losses[step - 10 : step]) / 10 for step in logged]
    torch.testing.assert_close(shown, means, rtol=1e-4, atol=0)

    loaded = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    load_training_state(tmp_path / "checkpoints" / "step_60", loaded, unexpected="ignore")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_the_value_model_learns_what_the_policy_earns(tmp_path: Path) -> None:
    policy, value_model = rl_value_model.train(str(tmp_path), 30)
    losses, rewards = curve(tmp_path, "value loss"), curve(tmp_path, "reward")
    assert losses[30] < losses[10] / 10
    assert rewards[30] > 0.9  # an untrained policy earns 1 / 8
    counting = (torch.arange(7) + torch.arange(8)[:, None]) % 8  # what earns every reward
    assert torch.equal(policy(counting[:, :-1]).argmax(-1), counting[:, 1:])
    worth = value_model(counting[:, :-1])
    assert worth.shape == (8, 6, 1)
    left = torch.arange(6.0, 0.0, -1.0).expand(8, 6)
    torch.testing.assert_close(worth.squeeze(-1), left, rtol=0, atol=0.5)
