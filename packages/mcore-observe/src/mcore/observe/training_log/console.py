"""Console output: the line of an interval, the time of a step, the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from mcore.observe.loss_totals import NAN, SKIPPED, loss_averages
from mcore.observe.memory import report_memory
from mcore.observe.scalars import as_number
from mcore.observe.training_log.interval import Interval
from mcore.observe.training_log.step import LogStep, StepValues, is_on
from mcore.parallel.groups import get_pg_rank
from mcore.versioning.process_rank import process_rank


class Field(NamedTuple):
    """A field of the console line, shown unless its value, which may be on a device, is None."""

    name: str
    value: Any
    spec: str


def line_fields(
    step: LogStep, values: StepValues, totals: Mapping[str, Any], interval: Interval
) -> list[Field]:
    """List the fields of the line in order, after the iteration."""
    train_state, seconds = step.global_state.train_state, interval.seconds_per_iteration
    skipped_samples = int(as_number(getattr(train_state, "skipped_train_samples", 0)) or 0)
    shows_throughput = is_on(step.config.logger, "log_throughput")
    return [
        Field("consumed samples", train_state.consumed_train_samples, "12d"),
        Field("skipped samples", skipped_samples or None, "12d"),
        Field(
            "elapsed time per iteration (ms)", math.nan if seconds is None else seconds * 1e3, ".1f"
        ),
        Field(
            "throughput per GPU (TFLOP/s/GPU)",
            interval.tflops_per_device if shows_throughput else None,
            ".1f",
        ),
        Field("energy per GPU (J/iter/GPU)", interval.joules_per_iteration, ".1f"),
        Field("power per GPU (W/GPU)", interval.watts, ".1f"),
        Field("learning rate", values.learning_rate, ".6E"),
        Field("global batch size", values.batch_size, "5d"),
        *(Field(name, average, ".6E") for name, average in loss_averages(totals).items()),
        Field("loss scale", values.loss_scale, ".1f"),
        Field("grad norm", values.grad_norm, ".3f"),
        Field("num zeros", values.num_zeros, ""),
        Field("params norm", values.params_norm, ".3f"),
        Field("max attention logit", values.max_attention_logit, ".3f"),
        Field("number of skipped iterations", totals[SKIPPED], "3d"),
        Field("number of nan iterations", totals[NAN], "3d"),
    ]


def print_line(step: LogStep, parts: Sequence[Field | str], numbers: Mapping[int, Any]) -> None:
    """Print fields with the numbers read for them, and texts that are already formatted."""
    total = "" if step.train_iters is None else f"/{step.train_iters:8d}"
    texts = [f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}{total} |"]
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
        elif part.value is not None:
            texts.append(f" {part.name}: {numbers[index]:{part.spec}} |")
    print("".join(texts), flush=True)  # noqa: T201


def print_step_time(interval: Interval) -> None:
    """Print time and throughput of a step on global rank 0, where the throughput is known."""
    if process_rank() == 0 and interval.tflops_per_device is not None:
        print(  # noqa: T201
            f"Step Time : {interval.seconds_per_iteration:.2f}s GPU utilization: "
            f"{interval.tflops_per_device:.1f}MODEL_TFLOP/s/GPU",
            flush=True,
        )


def print_memory(step: LogStep) -> None:
    """Print the memory of each rank that is first in its data-parallel group.

    Before that, global rank 0 calls ``global_state.theoretical_memory_fn``, where there is one.
    """
    estimate = getattr(step.global_state, "theoretical_memory_fn", None)
    if process_rank() == 0 and callable(estimate):
        estimate(step.config, step.num_microbatches)
    if get_pg_rank(step.group("dp")) != 0:
        return
    report = report_memory(getattr(step.config.logger, "memory_keys", None))
    if report:
        values = "".join(f" | {name}: {value}" for name, value in report.items())
        head = f"[Rank {process_rank()}] (after {step.iteration} iterations) memory (GB)"
        print(head + values, flush=True)  # noqa: T201
