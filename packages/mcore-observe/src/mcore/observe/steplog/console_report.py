"""Prints what the console shows of a step: the line, the step time, the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mcore.observe.host_reads import as_number
from mcore.observe.loss_totals import NAN, SKIPPED, loss_averages
from mcore.observe.memory import report_memory
from mcore.observe.moe_metrics import format_moe_text
from mcore.observe.steplog.collect import StepValues
from mcore.observe.steplog.console_line import ConsoleFacts, console_line, memory_line
from mcore.observe.steplog.experts import ExpertTexts
from mcore.observe.steplog.interval import Interval
from mcore.observe.steplog.step import LogStep, is_on
from mcore.parallel.groups import get_pg_rank
from mcore.versioning.process_rank import process_rank

__all__ = ["print_console_line", "print_memory", "print_step_time", "values_for_line"]

_LOSS, _TEXT, _FACT = "loss", "text", "fact"


def values_for_line(
    values: StepValues, totals: Mapping[str, Any], texts: ExpertTexts
) -> dict[tuple[str, str], Any]:
    """List what the line shows that may live on a device, to be read with all else.

    Args:
        values: What the training loop handed over.
        totals: Sums since the last line.
        texts: Metrics of experts that are no losses.

    Returns:
        Numbers, tensors of one element and None, by kind and name.
    """
    facts = {
        "learning_rate": values.learning_rate,
        "loss_scale": values.loss_scale,
        "grad_norm": values.grad_norm,
        "num_zeros": values.num_zeros,
        "params_norm": values.params_norm,
        "max_attention_logit": values.max_attention_logit,
    }
    wanted = {(_FACT, name): value for name, value in facts.items()}
    wanted |= {(_LOSS, name): average for name, average in loss_averages(totals).items()}
    return wanted | {(_TEXT, name): value for name, value in texts.values.items()}


def print_console_line(
    numbers: Mapping[tuple[str, str], Any],
    config: Any,
    train_state: Any,
    batch_size: int,
    totals: Mapping[str, Any],
    interval: Interval,
    ready_text: str,
) -> None:
    """Print the line.

    Args:
        numbers: The values of :func:`values_for_line` as Python numbers.
        config: The configuration.
        train_state: Progress.
        batch_size: Samples of a step.
        totals: Sums since the last line, for the counts of steps.
        interval: Figures of the interval.
        ready_text: Fields that another library has formatted.
    """

    def of_kind(kind: str) -> dict[str, Any]:
        return {name: number for (k, name), number in numbers.items() if k == kind}

    train_iters = as_number(getattr(config.train, "train_iters", None))
    seconds = interval.seconds_per_iteration
    shows_throughput = is_on(config.logger, "log_throughput")
    facts = ConsoleFacts(
        iteration=train_state.step,
        train_iters=None if train_iters is None else int(train_iters),
        consumed_samples=train_state.consumed_train_samples,
        skipped_samples=int(as_number(getattr(train_state, "skipped_train_samples", 0)) or 0),
        ms_per_iteration=math.nan if seconds is None else seconds * 1e3,
        batch_size=batch_size,
        skipped_iterations=totals[SKIPPED],
        nan_iterations=totals[NAN],
        tflops_per_device=interval.tflops_per_device if shows_throughput else None,
        joules_per_iteration=interval.joules_per_iteration,
        watts=interval.watts,
        losses=of_kind(_LOSS),
        extra=format_moe_text(of_kind(_TEXT)) + ready_text,
        **of_kind(_FACT),
    )
    print(console_line(facts, datetime.now()), flush=True)  # noqa: T201


def print_step_time(interval: Interval) -> None:
    """Print time and throughput of a step on global rank 0, where the throughput is known.

    Args:
        interval: Figures of the interval.
    """
    if process_rank() == 0 and interval.tflops_per_device is not None:
        print(  # noqa: T201
            f"Step Time : {interval.seconds_per_iteration:.2f}s GPU utilization: "
            f"{interval.tflops_per_device:.1f}MODEL_TFLOP/s/GPU",
            flush=True,
        )


def print_memory(config: Any, global_state: Any, step: LogStep, num_microbatches: int) -> None:
    """Print the memory of each rank that is first in its data-parallel group.

    Before that, global rank 0 calls ``global_state.theoretical_memory_fn(config,
    num_microbatches)`` if there is such a function. No communication.

    Args:
        config: The configuration.
        global_state: The state.
        step: The step.
        num_microbatches: Forward passes of a step.
    """
    estimate = getattr(global_state, "theoretical_memory_fn", None)
    if process_rank() == 0 and callable(estimate):
        estimate(config, num_microbatches)
    if get_pg_rank(step.group("dp")) != 0:
        return
    report = report_memory(getattr(config.logger, "memory_keys", None))
    if report:
        print(memory_line(process_rank(), step.iteration, report), flush=True)  # noqa: T201
