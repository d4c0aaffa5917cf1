"""The training log, and what it remembers from one call to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore.observe.loss_totals import add_step, count_iterations, reset_totals
from mcore.observe.rank_logging import is_last_rank
from mcore.observe.reports.memory import save_snapshot_at_profile_end
from mcore.observe.settings.secrets import mask_secrets
from mcore.observe.sinks.trackers import SinkTable, emit
from mcore.observe.timers import Timers
from mcore.observe.training_log.console import (
    Field,
    is_megatron_line,
    megatron_fields,
    print_line,
    print_memory,
    print_step_time,
    readable_fields,
)
from mcore.observe.training_log.expert_report import ExpertReport
from mcore.observe.training_log.figures import DataClock, measure_figures
from mcore.observe.training_log.interval import (
    IntervalClock,
    IntervalFlops,
    measure_interval,
)
from mcore.observe.training_log.step import LogStep, StepValues, is_on, samples_per_step
from mcore.observe.training_log.step_scalars import add_interval_scalars, add_step_scalars
from mcore.observe.training_log.timer_intervals import (
    IntervalTimes,
    TimerIntervals,
    timer_names,
    write_foreign_timers,
)
from mcore.observe.values.scalars import Scalars, as_number, one_number, only_numbers
from mcore.parallel.reductions import reduce_max_stat_across_model_parallel_group

logger = logging.getLogger(__name__)

# The attribute of a GlobalState under which its LogState is kept.
LOG_STATE = "_training_log_state"


@dataclass
class LogState:
    """What the training log of one GlobalState remembers from one call to the next."""

    sinks: SinkTable = field(default_factory=SinkTable)
    timers: TimerIntervals = field(default_factory=TimerIntervals)
    clock: IntervalClock = field(default_factory=IntervalClock)
    flops: IntervalFlops = field(default_factory=IntervalFlops)
    experts: ExpertReport = field(default_factory=ExpertReport)
    data: DataClock = field(default_factory=DataClock)
    samples: float | None = None  # since the last line, where they are counted
    tokens: float | None = None  # likewise
    has_warned_of_timers: bool = False

    def count(self, samples: float | None, tokens: float | None) -> None:
        """Add what a step has had of each, where that is known."""
        if samples is not None:
            self.samples = (self.samples or 0) + samples
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens


def log_state_of(global_state: Any) -> LogState:
    """Return what the log remembers for a state, made at the first call."""
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

    All ranks call it after every step, after ``train_state.step`` was incremented. On a step at
    which neither ``tensorboard_log_interval`` nor ``log_interval`` ends, it runs no collective
    and waits for no device. On the others the collectives are: a maximum of the learning rate
    over ``mp``, one all-gather of timers and a barrier over the world, a maximum of memory over
    ``pp``, the sums of MoE metrics and energy, and for the readable line one maximum over the
    world; each only where it is requested and its group has more than one rank.

    Trackers are those that ``global_state`` holds on this rank, usually the last one; that rank
    copies all device values to the host at once. A failing tracker is a warning. The console
    line comes from the last rank, or the only one.

    Every number may be a Python or NumPy number or a tensor with one element. Anything else is
    left out, with one warning that names it on the rank that writes.

    Args:
        loss_dict: Losses of the step, one element each.
        total_loss_dict: Sums since the last console line, kept by the caller: ``{}`` at first.
        learning_rate: Learning rate, or None on ranks without an optimizer.
        decoupled_learning_rate: That of parameters with a rate of their own, or None.
        loss_scale: Loss scale.
        report_memory_flag: Whether memory is still to be printed: True at first, then what the
            last call returned.
        skipped_iter: 1 if the optimizer skipped the step, else 0.
        grad_norm: L2 norm of the gradients, or None.
        params_norm: L2 norm of the parameters, or None.
        num_zeros_in_grad: Zeros in the gradients, or None.
        config: :class:`mcore.observe.ConfigContainer` or an object like it.
        global_state: :class:`mcore.observe.GlobalState` or an object like it.
        history_wct: One time stamp in seconds for each finished step, or None.
        model: The model chunks, or None.
        pg_collection: The groups ``mp``, ``pp``, ``dp``; a missing one has one rank. None takes
            ``pg_collection`` of the model, else the default ProcessGroups, else one process.
        log_max_attention_logit: Largest attention logit, or None.
        loaded_iteration: The step that the run resumed at, 0 for a new run.
        seq_length: Tokens of a sample; None takes ``config.dataset.seq_length``.

    Returns:
        The new ``report_memory_flag``: False from the second step of the process on.

    Raises:
        ValueError: A logging interval below 1, or gradient norms are asked for without a model.

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
        tensor([2.5000])
    """
    values = {
        "learning_rate": learning_rate,
        "decoupled_learning_rate": decoupled_learning_rate,
        "loss_scale": loss_scale,
        "grad_norm": grad_norm,
        "params_norm": params_norm,
        "num_zeros_in_grad": num_zeros_in_grad,
        "log_max_attention_logit": log_max_attention_logit,
    }
    return log_training_step(
        loss_dict,
        total_loss_dict,
        values,
        config,
        global_state,
        report_memory_flag=report_memory_flag,
        skipped_iter=skipped_iter,
        history_wct=history_wct,
        model=model,
        pg_collection=pg_collection,
        loaded_iteration=loaded_iteration,
        seq_length=seq_length,
    )


def log_training_step(
    loss_dict: Mapping[str, Any],
    total_loss_dict: dict[str, Any],
    values_by_name: Mapping[str, Any],
    config: Any,
    global_state: Any,
    *,
    report_memory_flag: bool = False,
    skipped_iter: int = 0,
    history_wct: Sequence[float] | None = None,
    model: Any = None,
    pg_collection: Any = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
    further: Mapping[str, Any] | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    steps: int = 1,
) -> bool:
    """Do what :func:`training_log` does, with further scalars and counts, for several steps."""
    if is_on(config.logger, "skip_train_metrics_log"):
        return report_memory_flag
    step = LogStep.of(
        config,
        global_state,
        model,
        skipped_iter=skipped_iter,
        pg_collection=pg_collection,
        loaded_iteration=loaded_iteration,
        seq_length=seq_length,
        steps=steps,
    )
    state = log_state_of(global_state)
    losses = only_numbers(loss_dict, warns=is_last_rank())
    _note_step(state, step, losses, total_loss_dict, steps)
    state.count(samples, tokens)
    scalars = Scalars()
    if not step.logs:
        state.experts.collect(step, scalars, total_loss_dict)
        return report_memory_flag
    values = _step_values(step, losses, values_by_name)
    iterations = count_iterations(total_loss_dict)
    times = _read_timers(state, step, iterations)
    if step.ends_sink_interval:
        add_step_scalars(scalars, values, step, model, history_wct)
        scalars.add_all(only_numbers(further or {}, warns=is_last_rank()))
    expert_fields = state.experts.collect(step, scalars, total_loss_dict)
    line: list[Field | str] = []
    if step.ends_console_interval:
        line = [*_line_fields(state, step, values, total_loss_dict, scalars), *expert_fields]
    _send(state, step, scalars, times, line if is_last_rank() else ())
    if not step.ends_console_interval:
        return report_memory_flag
    reset_totals(total_loss_dict)
    if report_memory_flag:
        print_memory(step)
        report_memory_flag = step.iteration <= loaded_iteration + 1
    _log_timers(step, times, iterations)
    return report_memory_flag


def _step_values(step: LogStep, losses: Mapping[str, Any], given: Mapping[str, Any]) -> StepValues:
    """Return the values of a step that are numbers, with one warning for each other on the writer.

    All ranks call it: the learning rate is the largest over ``mp``.
    """
    numbers = {name: one_number(name, v, warns=is_last_rank()) for name, v in given.items()}
    return StepValues(
        losses=losses,
        learning_rate=_largest_learning_rate(numbers.get("learning_rate"), step),
        decoupled_learning_rate=numbers.get("decoupled_learning_rate"),
        loss_scale=numbers.get("loss_scale"),
        grad_norm=numbers.get("grad_norm"),
        params_norm=numbers.get("params_norm"),
        num_zeros=numbers.get("num_zeros_in_grad"),
        max_attention_logit=numbers.get("log_max_attention_logit"),
        batch_size=samples_per_step(step.config, step.num_microbatches, step.pg_collection),
    )


def _line_fields(
    state: LogState,
    step: LogStep,
    values: StepValues,
    totals: Mapping[str, Any],
    scalars: Scalars,
) -> list[Field]:
    """Return the fields of the line; all ranks call it, and all measure what the line shows."""
    iterations = count_iterations(totals)
    interval = measure_interval(
        state.clock,
        state.flops,
        step.global_state,
        iterations=iterations,
        world_size=step.world_size,
    )
    add_interval_scalars(scalars, interval, step.config)
    if is_megatron_line(step.config.logger):
        print_step_time(interval)
        return megatron_fields(step, values, totals, interval)
    figures = measure_figures(
        step,
        values,
        totals,
        interval,
        iterations=iterations,
        waited_s=state.data.take_seconds(getattr(step.global_state, "timers", None)),
        samples=state.samples,
        tokens=state.tokens,
    )
    state.samples = state.tokens = None
    return readable_fields(step, values, totals, interval, figures)


def _note_step(
    state: LogState,
    step: LogStep,
    losses: Mapping[str, torch.Tensor],
    totals: dict[str, Any],
    steps: int,
) -> None:
    """Do what every step needs, logged or not; read no device unless the step was skipped."""
    add_step(totals, losses, step.skipped, steps)
    state.clock.note_steps(steps)
    state.flops.seed(step.global_state, step.loaded_iteration)
    # A monitor that is created on its first read starts counting then.
    getattr(step.global_state, "energy_monitor", None)
    state.experts.end_step(step)
    save_snapshot_at_profile_end(getattr(step.config, "profiling", None), step.iteration)


def _largest_learning_rate(learning_rate: Any, step: LogStep) -> Any:
    group = step.group("mp")
    if group is None:
        return learning_rate
    return reduce_max_stat_across_model_parallel_group(learning_rate, group)


def _timer_level(step: LogStep) -> int:
    return int(as_number(getattr(step.config.logger, "timing_log_level", 0)) or 0)


def _read_timers(state: LogState, step: LogStep, iterations: int) -> IntervalTimes | None:
    """Gather our timers over the ranks, or have those of another library written."""
    timers: Any = getattr(step.global_state, "timers", None)
    sinks = step.ends_sink_interval and is_on(step.config.logger, "log_timers_to_tensorboard")
    if isinstance(timers, Timers):
        return state.timers.gather(
            timers,
            _timer_level(step),
            iterations,
            sinks=sinks,
            console=step.ends_console_interval,
        )
    if timers is not None and sinks:
        try:
            write_foreign_timers(timers, _timer_level(step), step.global_state, iterations)
        except Exception as error:
            if not state.has_warned_of_timers:
                state.has_warned_of_timers = True
                text = mask_secrets(str(error))
                logger.warning("writing timers failed: %s: %s", type(error).__name__, text)
    return None


def _send(
    state: LogState,
    step: LogStep,
    scalars: Scalars,
    times: IntervalTimes | None,
    line: Sequence[Field | str],
) -> None:
    """Copy what this rank shows to the host, all at once, then send and print it."""
    sinks = state.sinks.to_log_to(step.global_state)
    if not sinks and not line:
        return
    if not sinks:
        scalars = Scalars()
    elif times is not None:
        scalars.add_all(times.longest())
    shown = {
        index: one_number(part.name, part.value)
        for index, part in enumerate(line)
        if isinstance(part, Field)
    }
    batches, numbers = scalars.read(shown)
    emit(sinks, batches, step.iteration, step.global_state.train_state.consumed_train_samples)
    if line:
        print_line(step, line, numbers)


def _log_timers(step: LogStep, times: IntervalTimes | None, iterations: int) -> None:
    """Log the times since the last console line, on the last rank."""
    timers: Any = getattr(step.global_state, "timers", None)
    if times is None:
        if timers is not None:
            names = list(timer_names(_timer_level(step)))
            timers.log(names, normalizer=step.config.logger.log_interval)
    elif times.of_console is not None and is_last_rank():
        rows = times.of_console.tolist()
        timers.log_text(timers.format(times.names, rows, iterations))
