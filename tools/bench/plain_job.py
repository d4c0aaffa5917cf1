"""The main job's model and steps in plain PyTorch, for one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pretrain.corpus import Corpus
from pretrain.run.schedule import learning_rate_at
from pretrain.settings import Settings


class PlainLayer(nn.Module):
    """Pre-norm attention and feed-forward over ``[b, s, h]``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden_size
        self.heads = settings.num_attention_heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(hidden, 3 * hidden), "projection": nn.Linear(hidden, hidden)}
        )
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.ModuleDict(
            {"widen": nn.Linear(hidden, 4 * hidden), "narrow": nn.Linear(4 * hidden, hidden)}
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[b, s, h]`` to the same."""
        batch, length, hidden = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x))
        qkv = qkv.view(batch, length, self.heads, -1).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        context = context.transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.attention["projection"](context)
        wide = F.gelu(self.feed_forward["widen"](self.feed_forward_norm(x)))
        added: torch.Tensor = x + self.feed_forward["narrow"](wide)
        return added


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainModel(nn.Module):
    """A GPT whose parameters have the main job's names and shapes."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary_size, settings.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(settings) for _ in range(settings.num_layers))
        self.final_norm = nn.LayerNorm(settings.hidden_size)
        half = settings.hidden_size // settings.num_attention_heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(settings.seq_length)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` bytes to logits ``[b, s, vocabulary]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.linear(self.final_norm(x), self.embedding.weight)


class PlainJob:
    """The steps of a model with fused AdamW."""

    def __init__(
        self, settings: Settings, corpus: Corpus, weights: dict[str, torch.Tensor]
    ) -> None:
        self.settings = settings
        self.corpus = corpus
        self.model = PlainModel(settings)
        self.model.load_state_dict(weights)
        params = list(self.model.parameters())
        decay = settings.weight_decay
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in params if p.dim() >= 2], "weight_decay": decay},
                {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, step: int) -> torch.Tensor:
        """Run a step and return its loss."""
        settings = self.settings
        rows = slice(0, settings.global_batch_size)
        batch = self.corpus.training_batch(settings, rows, step)
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_grad)
        rate = learning_rate_at(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
