"""Console output: the line of an interval, the time of a step, the memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, NamedTuple

import torch

from mcore.observe.loss_totals import NAN, SKIPPED, loss_averages
from mcore.observe.reports.memory import report_memory
from mcore.observe.training_log.figures import Figures
from mcore.observe.training_log.interval import Interval
from mcore.observe.training_log.step import LogStep, StepValues, is_on
from mcore.observe.values.scalars import as_number
from mcore.parallel.groups import get_pg_rank
from mcore.versioning.process_rank import process_rank

logger = logging.getLogger(__name__)


class Field(NamedTuple):
    """A field of the console line, shown unless its value, which may be on a device, is None."""

    name: str
    value: Any
    spec: str
    hidden: float | None = None  # a number that goes without saying
    same_as: str | None = None  # another field, with whose text this one goes without saying


def is_megatron_line(logger_config: Any) -> bool:
    """Return whether the line is Megatron-LM's, as for settings that know no other."""
    return getattr(logger_config, "console_format", None) != "readable"


def megatron_fields(
    step: LogStep, values: StepValues, totals: Mapping[str, Any], interval: Interval
) -> list[Field]:
    """List the fields of Megatron-LM's line in order, after the iteration."""
    seconds = interval.seconds_per_iteration
    shows_throughput = is_on(step.config.logger, "log_throughput")
    return [
        *_samples(step),
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
        *_norms(values),
        Field("number of skipped iterations", totals[SKIPPED], "3d"),
        Field("number of nan iterations", totals[NAN], "3d"),
    ]


def readable_fields(
    step: LogStep,
    values: StepValues,
    totals: Mapping[str, Any],
    interval: Interval,
    figures: Figures,
) -> list[Field]:
    """List the fields of the readable line, which leaves out what goes without saying."""
    seconds = interval.seconds_per_iteration
    shows_throughput = is_on(step.config.logger, "log_throughput") and interval.tflops
    has_device = torch.accelerator.is_available()
    largest = figures.largest_losses
    return [
        *_samples(step),
        Field("step ms", None if seconds is None else seconds * 1e3, ".1f"),
        Field("tokens/s", figures.tokens_per_s, ",.0f"),
        Field("samples/s", figures.samples_per_s, ",.1f"),
        Field("data %", figures.data_percent, ".1f"),
        Field(
            "throughput per GPU (TFLOP/s/GPU)",
            interval.tflops_per_device if shows_throughput and has_device else None,
            ".1f",
        ),
        Field("MFU %", figures.mfu_percent, ".1f"),
        Field("memory %", figures.memory_percent, ".1f"),
        Field("allocator retries", figures.allocator_retries, ".0f", hidden=0),
        Field("OOMs", figures.ooms, ".0f", hidden=0),
        Field("energy per GPU (J/iter/GPU)", interval.joules_per_iteration, ".1f"),
        Field("power per GPU (W/GPU)", interval.watts, ".1f"),
        Field("learning rate", values.learning_rate, ".6E"),
        Field("global batch size", values.batch_size, "5d"),
        *(
            field
            for name, average in loss_averages(totals).items()
            for field in (
                Field(name, average, ".6E"),
                Field(f"max {name}", largest.get(name), ".6E", same_as=name),
            )
        ),
        Field("loss scale", values.loss_scale, ".1f", hidden=1),
        *_norms(values),
        Field("number of skipped iterations", totals[SKIPPED], "3d", hidden=0),
        Field("number of nan iterations", totals[NAN], "3d", hidden=0),
    ]


def _samples(step: LogStep) -> list[Field]:
    train_state = step.global_state.train_state
    skipped = getattr(train_state, "skipped_train_samples", 0)
    return [
        Field("consumed samples", train_state.consumed_train_samples, "12d"),
        Field("skipped samples", int(as_number(skipped) or 0) or None, "12d"),
    ]


def _norms(values: StepValues) -> list[Field]:
    return [
        Field("grad norm", values.grad_norm, ".3f"),
        Field("num zeros", values.num_zeros, ""),
        Field("params norm", values.params_norm, ".3f"),
        Field("max attention logit", values.max_attention_logit, ".3f"),
    ]


def print_line(step: LogStep, parts: Sequence[Field | str], numbers: Mapping[int, Any]) -> None:
    """Print fields with the numbers read for them, and texts that are already formatted."""
    total = "" if step.train_iters is None else f"/{step.train_iters:8d}"
    texts = [f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}{total} |"]
    shown: dict[str, str] = {}
    for index, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        number = numbers.get(index)
        if number is None or number == part.hidden:
            continue
        text = f"{_as_spec(number, part.spec):{part.spec}}"
        if part.same_as is None or shown.get(part.same_as) != text:
            shown[part.name] = text
            texts.append(f" {part.name}: {text} |")
    line = "".join(texts)
    write_line(line if is_megatron_line(step.config.logger) else _coloured(line))


def _as_spec(number: Any, spec: str) -> Any:
    return int(number) if spec.endswith("d") and math.isfinite(number) else number


def write_line(text: str) -> None:
    """Print a line, above a progress bar of tqdm; a console that is gone is one warning."""
    try:
        with _above_a_bar():
            print(text, flush=True)  # noqa: T201
    except (OSError, ValueError) as error:
        _warn_of_console(type(error).__name__)


def _above_a_bar() -> AbstractContextManager[None]:
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None or not getattr(bars, "_instances", None):
        return contextlib.nullcontext()
    mode: AbstractContextManager[None] = bars.external_write_mode(file=sys.stdout)
    return mode


def _coloured(text: str) -> str:
    """Dim the time and show what is not finite in red, on a terminal that wants colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    text = re.sub(r"^ (\[[^]]*\])", " \033[2m\\1\033[0m", text)
    return re.sub(r"(?<=: )(-?(?:NAN|INF|nan|inf))\b", "\033[31m\\1\033[0m", text)


@functools.cache
def _warn_of_console(kind: str) -> None:
    logger.warning("the console takes no more lines (%s), training continues without them", kind)


def print_step_time(interval: Interval) -> None:
    """Print time and throughput of a step on global rank 0, where the throughput is known."""
    if process_rank() == 0 and interval.tflops_per_device is not None:
        write_line(
            f"Step Time : {interval.seconds_per_iteration:.2f}s GPU utilization: "
            f"{interval.tflops_per_device:.1f}MODEL_TFLOP/s/GPU"
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
        write_line(head + values)
