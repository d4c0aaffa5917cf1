"""The line that the console shows every log interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

__all__ = ["ConsoleFacts", "console_line", "memory_line"]


@dataclass(frozen=True)
class ConsoleFacts:
    """What the line shows; None leaves a field out.

    Attributes:
        iteration: Steps done.
        train_iters: Steps of the whole run.
        consumed_samples: Samples trained on.
        skipped_samples: Samples passed over; 0 leaves the field out.
        ms_per_iteration: Time of a step over the interval, in milliseconds.
        tflops_per_device: TFLOP/s of a GPU over the interval.
        joules_per_iteration: Energy of a GPU for a step.
        watts: Power of a GPU.
        learning_rate: Learning rate.
        batch_size: Samples of a step over the whole job.
        losses: Averages over the interval.
        loss_scale: Loss scale.
        grad_norm: L2 norm of the gradients.
        num_zeros: Zeros in the gradients.
        params_norm: L2 norm of the parameters.
        max_attention_logit: Largest attention logit.
        skipped_iterations: Skipped steps of the interval.
        nan_iterations: Those of them whose loss was not finite.
        extra: Further fields, each `` name: value |``.
    """

    iteration: int
    train_iters: int | None
    consumed_samples: int
    skipped_samples: int
    ms_per_iteration: float
    batch_size: int
    loss_scale: float
    skipped_iterations: int
    nan_iterations: int
    losses: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    tflops_per_device: float | None = None
    joules_per_iteration: float | None = None
    watts: float | None = None
    grad_norm: float | None = None
    num_zeros: float | int | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    extra: str = ""


def console_line(facts: ConsoleFacts, now: datetime) -> str:
    """Format the line; fields stand in a fixed order and each ends with `` |``.

    Args:
        facts: What to show.
        now: The local time.

    Returns:
        The line, without an end of line.

    Example:
        >>> facts = ConsoleFacts(
        ...     iteration=5, train_iters=None, consumed_samples=640, skipped_samples=0,
        ...     ms_per_iteration=100.0, batch_size=64, loss_scale=1.0, skipped_iterations=0,
        ...     nan_iterations=0,
        ... )
        >>> console_line(facts, datetime(2026, 1, 2, 3, 4, 5))[:43]
        ' [2026-01-02 03:04:05] iteration        5 |'
    """
    return f" [{now:%Y-%m-%d %H:%M:%S}]" + "".join(
        text
        for text in (
            _iteration(facts),
            _field("consumed samples", facts.consumed_samples, "12d"),
            _field("skipped samples", facts.skipped_samples or None, "12d"),
            _field("elapsed time per iteration (ms)", facts.ms_per_iteration, ".1f"),
            _field("throughput per GPU (TFLOP/s/GPU)", facts.tflops_per_device, ".1f"),
            _field("energy per GPU (J/iter/GPU)", facts.joules_per_iteration, ".1f"),
            _field("power per GPU (W/GPU)", facts.watts, ".1f"),
            _field("learning rate", facts.learning_rate, ".6E"),
            _field("global batch size", facts.batch_size, "5d"),
            *(_field(name, loss, ".6E") for name, loss in facts.losses.items()),
            _field("loss scale", facts.loss_scale, ".1f"),
            _field("grad norm", facts.grad_norm, ".3f"),
            _field("num zeros", facts.num_zeros, ""),
            _field("params norm", facts.params_norm, ".3f"),
            _field("max attention logit", facts.max_attention_logit, ".3f"),
            _field("number of skipped iterations", facts.skipped_iterations, "3d"),
            _field("number of nan iterations", facts.nan_iterations, "3d"),
            facts.extra,
        )
    )


def memory_line(rank: int, iteration: int, report: Mapping[str, float | int]) -> str:
    """Format a memory report of one rank.

    Args:
        rank: Global rank.
        iteration: Steps done.
        report: Values by name, as :func:`mcore.observe.report_memory` returns them.

    Returns:
        The line, without an end of line.

    Example:
        >>> memory_line(0, 2, {"mem-allocated-gigabytes": 1.2346})
        '[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 1.2346'
    """
    values = "".join(f" | {name}: {value}" for name, value in report.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (GB){values}"


def _iteration(facts: ConsoleFacts) -> str:
    total = "" if facts.train_iters is None else f"/{facts.train_iters:8d}"
    return f" iteration {facts.iteration:8d}{total} |"


def _field(name: str, value: float | int | None, spec: str) -> str:
    return "" if value is None else f" {name}: {value:{spec}} |"
