"""PPO with a value model made of the policy: a value head replaces its output layer.

python tools/examples/rl_value_model.py runs/ppo
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import dataclass

import torch
from torch import nn

from mcore.modules import create_value_head_hook
from mcore.observe import RunLog

VOCABULARY, LENGTH, SEQUENCES, HIDDEN = 8, 6, 128, 64


class LanguageModel(nn.Module):
    """A small language model. The value head replaces the attribute ``output_layer``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.output_layer: nn.Module = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[b, s, n]`` for tokens ``[b, s]``."""
        output = self.output_layer(self.layers(self.embedding(tokens))[0])
        # A value head returns its output and its bias.
        return output[0] if isinstance(output, tuple) else output


def value_model_of(policy: LanguageModel) -> nn.Module:
    """Return a copy of the policy that predicts the return of the rest of a sequence."""
    hook = create_value_head_hook(HIDDEN, sequence_parallel=False)
    return hook(copy.deepcopy(policy))[0]


@dataclass
class Rollout:
    """Sequences of a policy: tokens ``[b, s + 1]``, other fields ``[b, s]``."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    returns: torch.Tensor  # sum of the rewards from a token to the end
    rewards: torch.Tensor


@torch.no_grad()
def play(policy: LanguageModel) -> Rollout:
    """Sample from the policy. A token that is 1 more than the previous token has reward 1."""
    tokens = torch.randint(VOCABULARY, (SEQUENCES, 1))
    for _ in range(LENGTH):
        probabilities = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float()
    returns = rewards.flip(1).cumsum(1).flip(1)
    return Rollout(tokens, log_probs(policy, tokens), returns, rewards)


def log_probs(policy: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each sampled token ``[b, s]``."""
    chosen = tokens[:, 1:, None]
    return policy(tokens[:, :-1]).log_softmax(-1).gather(-1, chosen).squeeze(-1)


def improve(
    policy: LanguageModel,
    value_model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
) -> torch.Tensor:
    """Update both models by PPO with a rollout. Return the value loss before the updates."""
    inputs = rollout.tokens[:, :-1]
    with torch.no_grad():
        surprise = rollout.returns - value_model(inputs).squeeze(-1)
        advantages = (surprise - surprise.mean()) / (surprise.std() + 1e-6)
    for _ in range(4):
        ratio = (log_probs(policy, rollout.tokens) - rollout.log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = nn.functional.mse_loss(value_model(inputs).squeeze(-1), rollout.returns)
        optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        optimizer.step()
    return surprise.square().mean()


def train(folder: str, steps: int) -> tuple[LanguageModel, nn.Module]:
    """Train a policy and its value model, with a line of the log every tenth step."""
    torch.manual_seed(0)
    policy = LanguageModel()
    value_model = value_model_of(policy)
    parameters = [*policy.parameters(), *value_model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.003)
    with RunLog(folder, batch_size=SEQUENCES, train_iters=steps) as log:
        for _ in range(steps):
            rollout = play(policy)
            value_loss = improve(policy, value_model, optimizer, rollout)
            log.log_step({"value loss": value_loss, "reward": rollout.rewards.mean()}, lr=0.003)
    print(f"log: {folder}/metrics.jsonl")
    return policy, value_model


def main(words: list[str]) -> int:
    """Train in one process."""
    parser = argparse.ArgumentParser(description="PPO with a value model")
    parser.add_argument("folder", help="run folder")
    parser.add_argument("--steps", type=int, default=60)
    train(**vars(parser.parse_args(words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
