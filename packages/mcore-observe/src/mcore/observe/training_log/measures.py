"""Measures between two console lines: time, throughput, energy, waits, device, ranks, timers."""

from __future__ import annotations

import functools
import logging
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.loss_totals import loss_averages
from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks.scalars import as_number, widest_float
from mcore.observe.sinks.secrets import mask_secrets
from mcore.observe.timers import Timers, gather_seconds, longest_times
from mcore.observe.training_log.step import LogStep, is_on
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import all_gather_single, is_distributed

logger = logging.getLogger(__name__)

DATA_TIMER = "batch-generator"
_INTERVAL_TIMER = "interval-time"
_FLOPS_ANCHOR = "_flops_at_last_log"  # an attribute of the state
_NUM_LOSSES = 32  # losses that are reduced over the ranks: the message has a fixed size
_BLOCK = 1 + _NUM_LOSSES
_NOTHING = -math.inf  # the contribution of a rank without a value to a maximum

# Dense bf16 TFLOP/s by the start of torch's device name. If the maker states all three:
# multiprocessors * their clock in GHz under matrix load * operations of a multiprocessor per clock
# in thousands. Else the number of the data sheet, halved if it counts sparsity. None: unknown.
# The AMD Instinct MI250X is absent because torch shows each of its two dies as a device.
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU Architecture (white paper): boost clock
    "NVIDIA A100": 108 * 1.41 * 2.048,
    # NVIDIA H100 Tensor Core GPU Architecture (white paper): boost clock for tensor core operations
    "NVIDIA H100 PCIe": 114 * 1.62 * 4.096,
    "NVIDIA H100 80GB HBM3": 132 * 1.83 * 4.096,
    "NVIDIA H100 NVL": 835.0,  # NVIDIA H100 data sheet
    # NVIDIA H200 data sheet: the SXM part computes like the H100's
    "NVIDIA H200": 132 * 1.83 * 4.096,
    "NVIDIA H200 NVL": None,
    "NVIDIA B200": 2250.0,  # NVIDIA DGX B200 data sheet, divided by its devices
    "NVIDIA GB200": 2500.0,  # NVIDIA GB200 NVL72 data sheet, divided by its devices
    # NVIDIA Ada GPU Architecture (white paper) and L4 data sheet
    "NVIDIA L4": 58 * 2.04 * 1.024,
    # AMD CDNA 3 (white paper) and both data sheets
    "AMD Instinct MI300X": 304 * 2.1 * 2.048,
    "AMD Instinct MI325X": 304 * 2.1 * 2.048,
}

# The timers of the log: the phases of a step at level 1, those of a pipeline too at level 2.
_LEVEL_1 = (
    "forward-backward",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "all-grads-sync",
    "params-all-gather",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "optimizer",
)
_LEVEL_2 = (
    DATA_TIMER,
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)

# In upstream order: a method of a Timers object, and the attribute of the client it writes to.
_FOREIGN_WRITERS = (
    ("write_to_wandb", "wandb_logger"),
    ("write_to_mlflow", "mlflow_logger"),
    ("write_to_comet", "comet_logger"),
)


@dataclass(frozen=True)
class Interval:
    """The measures of one interval. Energy, power and throughput per device are per GPU.

    Those from ``tokens_per_s`` to ``ooms`` are measured for the readable line alone. Percentages
    and counts are the largest over all ranks.
    """

    seconds_per_iteration: float | None = None
    tflops_per_device: float | None = None
    tflops: float | None = None
    joules_per_iteration: float | None = None
    watts: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu_percent: float | None = None
    data_percent: Any = None
    memory_percent: Any = None
    allocator_retries: Any = None
    ooms: Any = None
    losses: Mapping[str, Any] = field(default_factory=dict)  # averages
    largest_losses: Mapping[str, Any] = field(default_factory=dict)
    step_losses: Mapping[str, Any] = field(default_factory=dict)


class IntervalMeter:
    """Measures an interval: time, operations, energy, samples, tokens and waits for data.

    The timer ``interval-time`` gives the time if the training loop runs it, else the time between
    calls of the log counts. The state counts operations. Its attribute ``_flops_at_last_log`` is
    the count at the last line.
    """

    def __init__(self) -> None:
        self._anchor_s: float | None = None
        self._steps = 0  # since the anchor
        self._names: set[str] = set()  # of the losses since the last line
        self._samples: float | None = None  # since the last line, None if nobody counts them
        self._tokens: float | None = None
        self._waited_s: float | None = None  # since the last line, None if a timer measures it
        self._seen_s = 0.0  # the data timer at the last line
        self._has_all_flops = True  # false if another process began the interval

    def start(self) -> None:
        """Start the time now instead of with the first step."""
        self._anchor_s = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave time out of the interval, such as that of an evaluation."""
        if self._anchor_s is not None:
            self._anchor_s += seconds

    def add_wait(self, seconds: float) -> None:
        """Add a wait for data that no timer measures."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    def note_step(self, step: LogStep) -> None:
        """Count a step without reading a device."""
        given = step.given
        self._names.update(step.losses)
        if self._anchor_s is None:
            # The first step ends here. Its beginning is unknown, so it is not timed.
            self._anchor_s = time.perf_counter()
        else:
            self._steps += given.steps
        if given.samples is not None:
            self._samples = (self._samples or 0) + given.samples
        if given.tokens is not None:
            self._tokens = (self._tokens or 0) + given.tokens
        if as_number(getattr(step.global_state, _FLOPS_ANCHOR, None)) is None:
            # A new run counts from 0. A resumed run without an anchor counts from here, and has no
            # throughput for the interval that another process began.
            so_far = _read_flops(step.global_state)
            if so_far is not None:
                self._has_all_flops = given.loaded_iteration == 0
                anchor = 0 if self._has_all_flops else so_far
                setattr(step.global_state, _FLOPS_ANCHOR, anchor)

    def measure(self, step: LogStep, totals: Mapping[str, Any], iterations: int) -> Interval:
        """Measure the interval that a console line ends, and start the next one.

        All ranks call it: a running timer is a barrier, energy is summed over the world, and
        :func:`reduce_over_ranks` may be an all-gather.
        """
        state = step.global_state
        seconds = self._take_seconds(getattr(state, "timers", None), iterations)
        operations = self._take_flops(state)
        tflops = operations / seconds / 1e12 if operations is not None and seconds else None
        per_iteration = None if seconds is None else seconds / iterations
        monitor = getattr(state, "energy_monitor", None)
        joules = None if monitor is None else as_number(monitor.lap())
        if joules is not None:
            joules = joules / iterations / step.world_size if math.isfinite(joules) else None
        interval = Interval(
            seconds_per_iteration=per_iteration,
            tflops_per_device=None if tflops is None else tflops / step.world_size,
            tflops=tflops,
            joules_per_iteration=joules,
            watts=joules / per_iteration if joules is not None and per_iteration else None,
        )
        # The totals also have losses of experts, which are reduced already.
        found = loss_averages(totals)
        averages = {name: found[name] for name in found if name in self._names}
        self._names = set()
        if step.has_megatron_line:
            ranks = reduce_over_ranks(step, averages)
            return replace(interval, losses=ranks.averages, step_losses=ranks.losses)
        return self._measure_readable(step, averages, interval, iterations)

    def _measure_readable(
        self, step: LogStep, averages: Mapping[str, Any], interval: Interval, iterations: int
    ) -> Interval:
        seconds = (interval.seconds_per_iteration or 0.0) * iterations
        samples, tokens = self._samples, self._tokens
        self._samples = self._tokens = None
        if samples is None:
            samples = step.batch_size * iterations
        if tokens is None and step.seq_length:
            tokens = samples * step.seq_length
        waited_s = self._take_wait(getattr(step.global_state, "timers", None))
        data = None
        if waited_s is not None and seconds:
            data = min(100.0, 100 * (waited_s / seconds))
        ranks = reduce_over_ranks(step, averages, [data, *_read_memory()])
        peak = _find_peak()
        tflops = interval.tflops_per_device
        return replace(
            interval,
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            samples_per_s=samples / seconds if not tokens and seconds else None,
            mfu_percent=100 * tflops / peak if tflops and peak else None,
            data_percent=ranks.measures[0],
            memory_percent=ranks.measures[1],
            allocator_retries=ranks.measures[2],
            ooms=ranks.measures[3],
            losses=ranks.averages,
            largest_losses=ranks.largest,
            step_losses=ranks.losses,
        )

    def _take_seconds(self, timers: Any, iterations: int) -> float | None:
        seconds = None
        if isinstance(timers, Timers):
            timer = timers.find(_INTERVAL_TIMER)
            seconds = (None if timer is None else timer.elapsed(barrier=True)) or None
        else:
            try:
                seconds = as_number(timers(_INTERVAL_TIMER).elapsed(barrier=True))
            except Exception:  # other libraries raise a bare Exception for a disabled timer
                seconds = None
        if seconds is None and self._anchor_s is not None and self._steps:
            # The first step of a process is not timed: give it the mean of the others.
            seconds = (time.perf_counter() - self._anchor_s) / self._steps * iterations
        self._anchor_s, self._steps = time.perf_counter(), 0
        return seconds

    def _take_flops(self, global_state: Any) -> float | None:
        """Return the operations of the job in a complete interval, and move the anchor."""
        so_far = _read_flops(global_state)
        anchor = as_number(getattr(global_state, _FLOPS_ANCHOR, None))
        if so_far is None:
            return None
        setattr(global_state, _FLOPS_ANCHOR, so_far)
        has_all, self._has_all_flops = self._has_all_flops, True
        return max(so_far - anchor, 0) if has_all and anchor is not None else None

    def _take_wait(self, timers: Any) -> float | None:
        """Return the waits since the last call: those added, else the time of the data timer."""
        added_s, self._waited_s = self._waited_s, None
        timer = timers.find(DATA_TIMER) if isinstance(timers, Timers) else None
        if timer is None or added_s is not None:
            return added_s
        active_s = timer.active_time()
        waited_s, self._seen_s = active_s - self._seen_s, active_s
        return waited_s if waited_s >= 0 else active_s  # below 0: the timers were made again


def _read_flops(global_state: Any) -> float | None:
    return as_number(getattr(global_state.train_state, "floating_point_operations_so_far", None))


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device, None for MIG parts and unknown devices."""
    if " MIG " in device_name:
        return None
    # "NVIDIA L4" must not match "NVIDIA L40S": a model name ends at a space or a hyphen.
    found = [
        name
        for name in _PEAKS
        if device_name.startswith(name) and device_name[len(name) : len(name) + 1] in ("", " ", "-")
    ]
    return _PEAKS[max(found, key=len)] if found else None


@functools.cache
def _find_peak() -> float | None:
    return peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _read_memory() -> list[float | None]:
    """Return the peak share of the device's memory in percent, allocator retries and OOMs."""
    if not torch.cuda.is_available():
        return [None, None, None]
    stats = torch.cuda.memory_stats()
    capacity = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    share = 100 * stats.get("reserved_bytes.all.peak", 0) / capacity
    return [share, stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)]


@dataclass(frozen=True)
class RankValues:
    """Values of all ranks, reduced: the largest measures, and losses by name."""

    measures: Sequence[float | None]
    averages: Mapping[str, Any]  # of the interval
    losses: Mapping[str, Any]  # of the step
    largest: Mapping[str, Any] = field(default_factory=dict)  # averages, over the world


def reduce_over_ranks(
    step: LogStep, averages: Mapping[str, Any], local: Sequence[float | None] = ()
) -> RankValues:
    """Reduce measures and losses over the ranks, the losses as the step requests.

    All ranks call it: one all-gather over the world, or none if nothing is reduced. Ranks without
    losses contribute nothing, and neither do ranks with losses of other names.
    """
    reduce = step.given.reduce
    shows_ranks = step.ends_console_interval and not step.has_megatron_line
    if step.world_size == 1 or not is_distributed() or not (shows_ranks or reduce != "last"):
        return RankValues(local, averages, step.losses)
    rows = _gather_rows(local, averages, step.losses)
    measures, *blocks = torch.split(rows, [len(local), _BLOCK, _BLOCK], dim=1)
    ranks = step.loss_ranks()
    found, losses = [
        own if reduce == "last" else _reduce_block(own, block[ranks], reduce)
        for own, block in zip((averages, step.losses), blocks, strict=True)
    ]
    names = blocks[0][:, 0]
    is_alike = len(set(names.tolist()) - {0.0}) <= 1
    if step.writes and (not is_alike or len(averages) > _NUM_LOSSES):
        warn_once(
            logger,
            "losses are not reduced over all ranks: only the first %d are, and only over ranks "
            "with losses of the same names",
            _NUM_LOSSES,
        )
    most = measures.nan_to_num(_NOTHING).amax(0).tolist()
    return RankValues(
        [None if value == _NOTHING else value for value in most],
        found,
        losses,
        largest=_reduce_block(averages, blocks[0], "max") if shows_ranks and is_alike else {},
    )


def _gather_rows(local: Sequence[float | None], *losses: Mapping[str, Any]) -> torch.Tensor:
    """Gather a row of every rank, ``[world_size, columns]`` on the host. Unknown values are NaN.

    A row has the measures, then a block for each of the losses: a digest of their names, and their
    values. Its size is fixed, since ranks may have different losses.
    """
    device = comm_device(dist.group.WORLD)
    dtype = widest_float(device)
    numbers = [math.nan if value is None else value for value in local]
    parts = [torch.tensor(numbers, dtype=dtype, device=device)]
    for by_name in losses:
        names = list(by_name)[:_NUM_LOSSES]
        block = torch.full((_BLOCK,), math.nan, dtype=dtype, device=device)
        block[0] = _digest(names)
        for index, name in enumerate(names, 1):
            block[index] = torch.as_tensor(by_name[name]).detach().reshape(())
        parts.append(block)
    row = torch.cat(parts)[None]
    rows = row.new_empty((dist.get_world_size(), row.shape[1]))
    all_gather_single(rows, row, dist.group.WORLD)
    return rows.cpu()


def _reduce_block(own: Mapping[str, Any], block: torch.Tensor, how: str) -> Mapping[str, Any]:
    """Return the mean or the largest of the losses of ranks with the same losses."""
    names = list(own)[:_NUM_LOSSES]
    values = block[block[:, 0] == _digest(names), 1 : 1 + len(names)]
    if not names or not len(values):
        return own
    reduced = values.mean(0) if how == "mean" else values.amax(0)  # NaN stays NaN
    return {**own, **dict(zip(names, reduced.tolist(), strict=True))}


def _digest(names: Sequence[str]) -> float:
    """Return a number for names that float32 holds, 0 without names."""
    return float((zlib.crc32("\0".join(names).encode()) >> 8) + 1) if names else 0.0


def timer_names(logger_config: Any) -> tuple[str, ...]:
    """Return the timers that are shown at the level of the settings."""
    level = int(as_number(getattr(logger_config, "timing_log_level", 0)) or 0)
    if level < 1:
        return ()
    return _LEVEL_1 if level < 2 else _LEVEL_1 + _LEVEL_2


@dataclass(frozen=True)
class TimerRows:
    """Seconds of all ranks, ``[world_size, len(names)]`` on the device of the collective."""

    names: tuple[str, ...]
    of_sinks: torch.Tensor | None
    of_console: torch.Tensor | None
    sink_iterations: int

    def longest(self) -> dict[str, float]:
        """Return ``{name}-time`` in seconds per step for the sinks. Copies to the host."""
        if self.of_sinks is None:
            return {}
        return longest_times(self.names, self.of_sinks.tolist(), self.sink_iterations)


class TimerReader:
    """Reads timers for the sinks and for the console, which have intervals of different lengths.

    Timers run from one console line to the next. Sinks get the difference to their last reading.
    """

    def __init__(self) -> None:
        # The readings of the sinks, relative to the last reset of the timers.
        self._seen_s: dict[str, float] = {}
        self._seen_iterations = 0
        self._has_warned = False

    def read(self, step: LogStep, iterations: int) -> TimerRows | None:
        """Gather our timers over the ranks, or let a timers object of another library write.

        All ranks call it. Our timers need one all-gather over the world, none if no timer is shown.
        ``iterations`` are the steps since the last console line.
        """
        timers: Any = getattr(step.global_state, "timers", None)
        for_sinks = step.ends_sink_interval and is_on(
            step.config.logger, "log_timers_to_tensorboard"
        )
        names = timer_names(step.config.logger)
        if isinstance(timers, Timers):
            return self._gather(timers, names, step, iterations, for_sinks=for_sinks)
        if timers is not None and for_sinks:
            try:
                _write_foreign(timers, list(names), step.global_state, iterations)
            except Exception as error:
                if not self._has_warned:
                    self._has_warned = True
                    text = mask_secrets(str(error))
                    logger.warning("writing timers failed: %s: %s", type(error).__name__, text)
        return None

    def _gather(
        self, timers: Timers, names: tuple[str, ...], step: LogStep, iterations: int, *,
        for_sinks: bool,
    ) -> TimerRows:  # fmt: skip
        for_console = step.ends_console_interval
        local = timers.local_seconds(names, reset=for_console) if names else []
        by_name = dict(zip(names, local, strict=True))
        sent: list[float] = []
        if for_sinks:
            seen = [self._seen_s.get(name, 0.0) for name in names]
            # A reading below the last one: other code has reset the timer since.
            sent += [n - s if n >= s else n for n, s in zip(local, seen, strict=True)]
        if for_console:
            sent += local
        sink_iterations = iterations - self._seen_iterations
        if for_sinks:
            self._seen_s, self._seen_iterations = by_name, iterations
        if for_console:  # the timers restart at zero, so the readings become negative
            self._seen_s = {
                name: self._seen_s.get(name, 0.0) - now for name, now in by_name.items()
            }
            self._seen_iterations -= iterations
        rows = gather_seconds(sent) if sent else None
        return TimerRows(
            names,
            of_sinks=rows[:, : len(names)] if for_sinks and rows is not None else None,
            of_console=rows[:, -len(names) :] if for_console and rows is not None else None,
            sink_iterations=sink_iterations if sink_iterations > 0 else iterations,
        )


def _write_foreign(timers: Any, names: list[str], global_state: Any, iterations: int) -> None:
    """Let a timers object of another library write to the clients of the trackers.

    All ranks call it, since such an object gathers over the ranks in each call. The last call
    resets its timers.
    """
    step = global_state.train_state.step
    further = [
        (getattr(timers, method), getattr(global_state, client, None))
        for method, client in _FOREIGN_WRITERS
        if callable(getattr(timers, method, None))
    ]
    writer = getattr(global_state, "tensorboard_logger", None)
    timers.write(names, writer, step, normalizer=iterations, reset=not further)
    for index, (write, client) in enumerate(further):
        write(names, client, step, normalizer=iterations, reset=index == len(further) - 1)
