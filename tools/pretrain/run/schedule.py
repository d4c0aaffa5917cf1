"""The learning rate of a step."""

from __future__ import annotations

import math

from pretrain.settings import Settings


def learning_rate_at(settings: Settings, step: int) -> float:
    """Linear warm-up, then the schedule of the settings. ``step`` counts from 1."""
    peak, final, decay = settings.lr, settings.min_lr, settings.decay
    if step <= settings.warmup_iters:
        return peak * step / settings.warmup_iters
    if settings.lr_schedule == "constant" or step <= decay.start:
        return peak
    progress = min(1.0, (step - decay.start) / max(1, decay.stop - decay.start))
    if settings.lr_schedule != "cosine":
        return final + (peak - final) * (1.0 - progress)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def lower_rates(settings: Settings) -> str:
    """Options for a second try after a divergence."""
    return f" --lr {settings.lr / 10:g} --min-lr {settings.min_lr / 10:g}"


def describe_schedule(settings: Settings, first: int) -> str:
    """The learning rate at the steps where its course changes, from a first step on."""
    decay, last = settings.decay, settings.train_iters
    turns = {settings.warmup_iters} | ({decay.start, decay.stop} if decay else set())
    steps = sorted({first, last, *(turn for turn in turns if first < turn < last)})
    rates = [f"{learning_rate_at(settings, step):.3g} at step {step}" for step in steps]
    return f"{settings.lr_schedule}: {', '.join(rates)}"
