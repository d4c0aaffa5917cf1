"""The console: the line of an interval in both formats, step time, memory and timers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import torch

from mcore.observe.loss_totals import NAN, SKIPPED, loss_averages
from mcore.observe.rank_logging import warn_once
from mcore.observe.reports import report_memory
from mcore.observe.sinks.scalars import as_number
from mcore.observe.terminal import plain
from mcore.observe.training_log.measures import Interval, TimerRows, timer_names
from mcore.observe.training_log.step import LogStep, StepInput, is_on
from mcore.parallel.groups import get_pg_rank
from mcore.versioning.process_rank import process_rank

logger = logging.getLogger(__name__)


class Field(NamedTuple):
    """A field of the line, left out if its value is None. The value may be on a device."""

    name: str
    value: Any
    spec: str
    hidden: float | None = None  # the usual number, which is not shown
    same_as: str | None = None  # another field: if the texts are equal, only that one is shown


def list_fields(
    step: LogStep, values: StepInput, totals: Mapping[str, Any], interval: Interval
) -> list[Field]:
    """List the fields of the line in order, after the iteration and before experts' metrics."""
    train_state = step.global_state.train_state
    skipped_samples = getattr(train_state, "skipped_train_samples", 0)
    samples = [
        Field("consumed samples", train_state.consumed_train_samples, "12d"),
        Field("skipped samples", int(as_number(skipped_samples) or 0) or None, "12d"),
    ]
    energy = [
        Field("energy per GPU (J/iter/GPU)", interval.joules_per_iteration, ".1f"),
        Field("power per GPU (W/GPU)", interval.watts, ".1f"),
        Field("learning rate", values.learning_rate, ".6E"),
        Field("global batch size", step.batch_size, "5d"),
    ]
    norms = [
        Field("grad norm", values.grad_norm, ".3f"),
        Field("num zeros", values.num_zeros_in_grad, ""),
        Field("params norm", values.params_norm, ".3f"),
        Field("max attention logit", values.log_max_attention_logit, ".3f"),
    ]
    averages = loss_averages(totals) | dict(interval.losses)
    seconds = interval.seconds_per_iteration
    milliseconds = None if seconds is None else seconds * 1e3
    tflops_per_device = interval.tflops_per_device
    if not is_on(step.config.logger, "log_throughput"):
        tflops_per_device = None
    losses: list[Field] = []
    for name, average in averages.items():
        losses.append(Field(name, average, ".6E"))
        largest = interval.largest_losses.get(name)
        losses.append(Field(f"max {name}", largest, ".6E", same_as=name))
    is_megatron = step.has_megatron_line  # parsers of logs rely on its names, specs and order
    throughput = "throughput per GPU (TFLOP/s/GPU)"
    if is_megatron:
        shown_ms = math.nan if milliseconds is None else milliseconds
        speed = [
            Field("elapsed time per iteration (ms)", shown_ms, ".1f"),
            Field(throughput, tflops_per_device, ".1f"),
        ]
    else:
        shows_tflops = torch.accelerator.is_available() and interval.tflops
        speed = [
            Field("step ms", milliseconds, ".1f"),
            Field("tokens/s", interval.tokens_per_s, ",.0f"),
            Field("samples/s", interval.samples_per_s, ",.1f"),
            Field("data %", interval.data_percent, ".1f"),
            Field(throughput, tflops_per_device if shows_tflops else None, ".1f"),
            Field("MFU %", interval.mfu_percent, ".1f"),
            Field("memory %", interval.memory_percent, ".1f"),
            Field("allocator retries", interval.allocator_retries, ".0f", hidden=0),
            Field("OOMs", interval.ooms, ".0f", hidden=0),
        ]
    return [
        *samples,
        *speed,
        *energy,
        *losses,
        Field("loss scale", values.loss_scale, ".1f", hidden=None if is_megatron else 1),
        *norms,
        *(
            Field(f"number of {kind}", totals[kind], "3d", hidden=None if is_megatron else 0)
            for kind in (SKIPPED, NAN)
        ),
    ]


def print_line(step: LogStep, parts: Sequence[Field | str], numbers: Mapping[int, Any]) -> None:
    """Print fields with the numbers read for them by position, and texts as they are."""
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
        if part.spec.endswith("d") and math.isfinite(number):
            number = int(number)
        text = f"{number:{part.spec}}"
        if part.same_as is None or shown.get(part.same_as) != text:
            shown[part.name] = text
            texts.append(f" {part.name}: {text} |")
    write_line("".join(texts), has_colours=not step.has_megatron_line)


def _colour(text: str) -> str:
    """Dim the time and show numbers that are not finite in red, on a terminal with colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    text = re.sub(r"^ (\[[^]]*\])", " \033[2m\\1\033[0m", text)
    return re.sub(r"(?<=: )(-?(?:NAN|INF|nan|inf))\b", "\033[31m\\1\033[0m", text)


def write_line(text: str, *, has_colours: bool = False) -> None:
    """Print a line, above a progress bar of tqdm. A broken console gives one warning."""
    text = plain(text)  # names may have escape sequences
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    try:
        with contextlib.ExitStack() as stack:
            if getattr(bars, "_instances", None):
                stack.enter_context(bars.external_write_mode(file=sys.stdout))
            print(_colour(text) if has_colours else text, flush=True)  # noqa: T201
    except (OSError, ValueError) as error:
        text = "cannot write to the console (%s); training continues"
        warn_once(logger, text, type(error).__name__)


def print_step_time(interval: Interval) -> None:
    """Print time and throughput of a step on global rank 0, if the throughput is known."""
    if process_rank() == 0 and interval.tflops_per_device is not None:
        write_line(
            f"Step Time : {interval.seconds_per_iteration:.2f}s GPU utilization: "
            f"{interval.tflops_per_device:.1f}MODEL_TFLOP/s/GPU"
        )


def print_memory(step: LogStep) -> None:
    """Print the memory of each rank that is first in its data-parallel group.

    Before that, global rank 0 calls ``global_state.theoretical_memory_fn`` if there is one.
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


def log_timers(step: LogStep, rows: TimerRows | None, iterations: int) -> None:
    """Log the times since the last console line on the last rank.

    All ranks call it: a timers object of another library gathers over the ranks in this call.
    """
    timers: Any = getattr(step.global_state, "timers", None)
    if rows is None:
        if timers is not None:
            names = list(timer_names(step.config.logger))
            timers.log(names, normalizer=step.config.logger.log_interval)
    elif rows.of_console is not None and step.writes:
        timers.log_text(timers.format(rows.names, rows.of_console.tolist(), iterations))
