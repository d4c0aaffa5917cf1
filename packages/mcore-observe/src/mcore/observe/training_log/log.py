"""The training log: its entries, the order of work at a step, and the values for trackers."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from mcore.observe.loss_totals import add_step, count_iterations, reset_totals
from mcore.observe.norms import find_process_groups, gradient_norms
from mcore.observe.rank_logging import warn_once
from mcore.observe.reports import (
    report_memory,
    report_runtime,
    report_throughput,
    save_snapshot_at_profile_end,
)
from mcore.observe.sinks.scalars import Scalars, as_number, one_number, only_numbers
from mcore.observe.sinks.trackers import SinkTable, emit
from mcore.observe.training_log.console import (
    Field,
    list_fields,
    log_timers,
    print_line,
    print_memory,
    print_step_time,
)
from mcore.observe.training_log.expert_report import ExpertReport
from mcore.observe.training_log.measures import (
    Interval,
    IntervalMeter,
    TimerReader,
    TimerRows,
    reduce_over_ranks,
)
from mcore.observe.training_log.step import (
    LogStep,
    StepInput,
    find_num_microbatches,
    is_on,
    samples_per_step,
)
from mcore.parallel.reductions import reduce_max_memory_across_pp_group

_log = logging.getLogger(__name__)


def add_step_values(scalars: Scalars, step: LogStep, values: StepInput) -> None:
    """Collect the values of a step without copying to the host.

    All ranks call it: if requested, memory is the maximum over ``pp``, and norms of DTensor
    gradients are summed over their shards.
    """
    logger, train_state = step.config.logger, step.global_state.train_state
    if is_on(logger, "log_memory_to_tensorboard"):
        memory, pp_group = report_memory(getattr(logger, "memory_keys", None)), step.group("pp")
        if pp_group is not None:
            memory = reduce_max_memory_across_pp_group(memory, pp_group)
        scalars.add_all(memory, prefix="memory/")
    if is_on(logger, "log_throughput_to_tensorboard"):
        # During a batch-size ramp the configuration has the final size, the step the present one.
        sizes = SimpleNamespace(
            micro_batch_size=step.config.train.micro_batch_size, global_batch_size=step.batch_size
        )
        window, history = logger.throughput_window_size, values.history_wct
        scalars.add_all(report_throughput(sizes, step.iteration, step.seq_length, history, window))
    if is_on(logger, "log_runtime_to_tensorboard"):
        runtime = report_runtime(
            train_state, step.global_state.start_time, step.seq_length, step.train_iters,
            logger.runtime_time_unit, start_step=values.loaded_iteration,
        )  # fmt: skip
        scalars.add_all(runtime)
    if is_on(logger, "log_l2_norm_grad_to_tensorboard"):
        if values.model is None:
            raise ValueError(
                "log_l2_norm_grad_to_tensorboard is on but the model is None; give the model"
            )
        scalars.add_all(gradient_norms(values.model))
    plain: dict[str, object] = {}
    if getattr(getattr(step.config, "optimizer", None), "decoupled_lr", None) is not None:
        plain["decoupled-learning-rate"] = values.decoupled_learning_rate
    if as_number(getattr(train_state, "skipped_train_samples", 0)):
        plain["skipped-train-samples"] = train_state.skipped_train_samples
    further: dict[str, object] = {}
    if is_on(logger, "log_loss_scale_to_tensorboard"):
        further["loss-scale"] = values.loss_scale
    if is_on(logger, "log_world_size_to_tensorboard"):
        further["world-size"] = step.world_size
    further["grad-norm"] = values.grad_norm
    further["num-zeros"] = values.num_zeros_in_grad
    further["params-norm"] = values.params_norm
    further["max-attention-logit"] = values.log_max_attention_logit
    batch_size = step.batch_size
    # Files and trackers keep this order. A loss may share a name with a value: it needs its own
    # call, since one dict would drop one of the two.
    scalars.add("samples vs steps", as_number(train_state.consumed_train_samples))
    scalars.add("learning-rate", values.learning_rate, versus_samples=True)
    scalars.add_all(plain)
    scalars.add("batch-size", batch_size, versus_samples=True)
    scalars.add_all(values.losses, versus_samples=True)
    scalars.add_all(further, versus_samples=True)
    for name in ["learning-rate", "batch-size", *plain, *further] if step.writes else ():
        if name in values.scalars:
            warn_once(_log, "the metric %r replaces that of the log: give it another name", name)
    scalars.add_all(only_numbers(values.scalars, warns=step.writes))


def add_interval_values(scalars: Scalars, step: LogStep, interval: Interval) -> None:
    """Collect the values that are known only with a console line."""
    found: dict[str, float | None] = {}
    if is_on(step.config.logger, "log_throughput_to_tensorboard"):
        found["throughput/tflops/device"] = interval.tflops_per_device
        found["throughput/tflops"] = interval.tflops
    if is_on(step.config.logger, "log_timers_to_tensorboard"):
        found["iteration-time"] = interval.seconds_per_iteration
    found["iter-energy/gpu"] = interval.joules_per_iteration
    found["power/gpu"] = interval.watts
    scalars.add_all(found)


# The attribute of a GlobalState that holds its LogState.
LOG_STATE = "_training_log_state"


@dataclass
class LogState:
    """The memory of one GlobalState's log from one call to the next."""

    sinks: SinkTable = field(default_factory=SinkTable)
    timers: TimerReader = field(default_factory=TimerReader)
    meter: IntervalMeter = field(default_factory=IntervalMeter)
    experts: ExpertReport = field(default_factory=ExpertReport)


def log_state_of(global_state: Any) -> LogState:
    """Return the log's memory of a state, made at the first call."""
    found = getattr(global_state, LOG_STATE, None)
    if not isinstance(found, LogState):
        found = LogState()
        setattr(global_state, LOG_STATE, found)
    return found


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float | None,
    decoupled_learning_rate: float | None,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float | None,
    params_norm: float | None,
    num_zeros_in_grad: int | None,
    config: Any,
    global_state: Any,
    history_wct: list[float] | None,
    model: list[torch.nn.Module] | None,
    *,
    pg_collection: Any = None,
    log_max_attention_logit: float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Log a step: sum losses, send scalars to trackers, print a line to the console.

    All ranks call it after every step, when ``train_state.step`` has been incremented. It runs
    collectives and waits for the device only on steps that end ``tensorboard_log_interval`` or
    ``log_interval``. Each of these collectives runs if its values are requested and its group has
    more than one rank: a maximum of the learning rate over ``mp``, one all-gather of timers and a
    barrier over the world, a maximum of memory over ``pp``, the sums of MoE metrics, of energy and
    of norms of DTensor gradients, and for the readable line one all-gather over the world.

    The last rank prints the line. A rank with trackers in ``global_state``, usually the last one,
    copies all device values to the host at once. An exception of a tracker becomes a warning.

    Every number may be a Python or NumPy number or a tensor with one element. Other values are
    left out, with one warning for each name on the last rank.

    Args:
        loss_dict: Losses of the step, one element each.
        total_loss_dict: Sums since the last console line. The caller keeps them, ``{}`` at first.
        learning_rate: Learning rate, or None on ranks without an optimizer.
        decoupled_learning_rate: Learning rate of the parameters with a separate rate, or None.
        loss_scale: Loss scale.
        report_memory_flag: Whether to print memory with the next line. Pass True at first, then
            the result of the last call.
        skipped_iter: 1 if the optimizer skipped the step, else 0.
        grad_norm: L2 norm of the gradients, or None.
        params_norm: L2 norm of the parameters, or None.
        num_zeros_in_grad: Zeros in the gradients, or None.
        config: :class:`mcore.observe.ConfigContainer` or an object like it.
        global_state: :class:`mcore.observe.GlobalState` or an object like it.
        history_wct: One time stamp in seconds for each finished step, or None.
        model: The model chunks, or None.
        pg_collection: The groups ``mp``, ``pp``, ``dp``. A missing group has one rank. None means
            ``pg_collection`` of the model, else the default ProcessGroups, else one process.
        log_max_attention_logit: Largest attention logit, or None.
        loaded_iteration: The step that the run resumed at, 0 for a new run.
        seq_length: Tokens of a sample. None means ``config.dataset.seq_length``.

    Returns:
        The new ``report_memory_flag``: False from the second step of the process on.

    Raises:
        ValueError: A logging interval is below 1, or gradient norms are requested without a model.

    Example:
        >>> from mcore.observe import ConfigContainer, GlobalState, LoggerConfig
        >>> state = GlobalState(ConfigContainer(logger=LoggerConfig(log_interval=2)))
        >>> state.train_state.step = 1
        >>> totals = {}
        >>> training_log(
        ...     {"lm loss": torch.tensor(2.5)}, totals, 1e-4, None, 1.0, False, 0, None, None,
        ...     None, state.cfg, state, None, None,
        ... )
        False
        >>> totals["lm loss"]
        tensor([2.5000], dtype=torch.float64)
    """
    given = StepInput(
        losses=loss_dict, learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate, loss_scale=loss_scale,
        grad_norm=grad_norm, params_norm=params_norm, num_zeros_in_grad=num_zeros_in_grad,
        log_max_attention_logit=log_max_attention_logit, skipped=bool(skipped_iter), model=model,
        pg_collection=pg_collection, history_wct=history_wct, loaded_iteration=loaded_iteration,
        seq_length=seq_length,
    )  # fmt: skip
    return log_training_step(given, config, global_state, total_loss_dict, report_memory_flag)


class StepCounter:
    """Counters, loss sums and time stamps for loops that call :meth:`GlobalState.log_step`."""

    def __init__(self) -> None:
        self.first_step: int | None = None  # the number of steps before the first call
        self._totals: dict[str, Any] = {}
        self._finished: collections.deque[float] = collections.deque()

    def log(self, given: StepInput, config: Any, global_state: Any) -> None:
        """Advance the counters, complete the input, and log the steps. All ranks call it."""
        progress = global_state.train_state
        if self.first_step is None:
            self.first_step = progress.step
        if given.samples is None:
            groups = find_process_groups(given.pg_collection, given.model)
            microbatches = find_num_microbatches(config, global_state, groups)
            given.samples = samples_per_step(config, microbatches, groups) * given.steps
        progress.step += given.steps
        progress.consumed_train_samples += int(given.samples)
        if given.skipped:
            progress.skipped_train_samples += int(given.samples)
        window = as_number(getattr(config.logger, "throughput_window_size", None)) or 100
        now_s = time.time()
        since_s = self._finished[-1] if self._finished else now_s
        self._finished.extend(  # the steps since the last call, evenly spaced
            now_s - (now_s - since_s) * left / given.steps for left in reversed(range(given.steps))
        )
        while len(self._finished) > window + 1:
            self._finished.popleft()
        given.history_wct = list(self._finished) if len(self._finished) > window else None
        given.loaded_iteration = self.first_step
        log_training_step(given, config, global_state, self._totals)
        if not count_iterations(self._totals):  # a line has shown the sums
            self._totals.clear()  # a loss that the loop stops reporting must not appear as 0


def log_training_step(
    given: StepInput,
    config: Any,
    global_state: Any,
    totals: dict[str, Any],
    report_memory_flag: bool = False,
) -> bool:
    """Log a step for all entries, as :func:`training_log` describes, and return the new flag.

    No collective depends on the rank, so all ranks run the same collectives in the same order.
    """
    if is_on(config.logger, "skip_train_metrics_log"):
        return report_memory_flag
    step = LogStep.of(given, config, global_state)
    state = log_state_of(global_state)

    # Every step: losses are summed on the device, which is read only if the step was skipped.
    add_step(totals, step.losses, given.skipped, given.steps)
    state.meter.note_step(step)
    getattr(global_state, "energy_monitor", None)  # the first read creates it and starts counting
    state.experts.end_step(step)
    save_snapshot_at_profile_end(getattr(config, "profiling", None), step.iteration)
    scalars = Scalars()
    if not step.logs:
        state.experts.collect(step, scalars, totals)  # foreign trackers expect every step
        return report_memory_flag

    # Steps that log: collect the values of trackers and of the line. They stay on the device,
    # except for losses that are reduced over the ranks.
    values = step.reduce_values()
    iterations = count_iterations(totals)
    rows = state.timers.read(step, iterations)
    if step.ends_console_interval:
        interval = state.meter.measure(step, totals, iterations)
    else:
        interval = Interval(step_losses=reduce_over_ranks(step, {}).losses)
    if step.ends_sink_interval:
        add_step_values(scalars, step, replace(values, losses=interval.step_losses))
    expert_fields = state.experts.collect(step, scalars, totals)
    line: list[Field | str] = []
    if step.ends_console_interval:
        add_interval_values(scalars, step, interval)
        if step.has_megatron_line:
            print_step_time(interval)
        line = [*list_fields(step, values, totals, interval), *expert_fields]
    _send(state.sinks, step, scalars, rows, line if step.writes else ())
    if not step.ends_console_interval:
        return report_memory_flag

    # The next interval of the console starts.
    reset_totals(totals)
    if report_memory_flag:
        print_memory(step)
        report_memory_flag = step.iteration <= given.loaded_iteration + 1
    log_timers(step, rows, iterations)
    return report_memory_flag


def _send(
    table: SinkTable,
    step: LogStep,
    scalars: Scalars,
    rows: TimerRows | None,
    line: Sequence[Field | str],
) -> None:
    """Copy the values of this rank to the host, all at once, then send and print them."""
    sinks = table.to_log_to(step.global_state)
    if not sinks and not line:
        return
    if not sinks:
        scalars = Scalars()
    elif rows is not None:
        scalars.add_all(rows.longest())
    fields = {
        index: one_number(part.name, part.value)
        for index, part in enumerate(line)
        if isinstance(part, Field)
    }
    batches, numbers = scalars.read(fields)
    emit(sinks, batches, step.iteration, step.global_state.train_state.consumed_train_samples)
    if line:
        print_line(step, line, numbers)
