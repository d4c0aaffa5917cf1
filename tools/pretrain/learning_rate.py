"""The learning rate of each step."""

from __future__ import annotations

import math


def learning_rate_at(
    step: int, *, peak: float, final: float, warmup_iters: int, train_iters: int
) -> float:
    """Linear warm-up, then a half cosine to ``final``; ``step`` counts from 1."""
    if step <= warmup_iters:
        return peak * step / warmup_iters
    progress = (step - warmup_iters) / max(1, train_iters - warmup_iters)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
