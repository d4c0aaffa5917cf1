"""The training log: called after every step by all ranks, writes to console and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcore.observe.host_reads import as_number
from mcore.observe.loss_totals import add_step, count_iterations, reset_totals
from mcore.observe.memory import save_snapshot_at_profile_end
from mcore.observe.rank_logging import is_last_rank
from mcore.observe.scalars import Scalars
from mcore.observe.sinks.trackers import emit
from mcore.observe.steplog.collect import (
    StepValues,
    add_interval_scalars,
    add_step_scalars,
    collect_memory,
)
from mcore.observe.steplog.console_report import (
    print_console_line,
    print_memory,
    print_step_time,
    values_for_line,
)
from mcore.observe.steplog.experts import ExpertTexts
from mcore.observe.steplog.interval import Interval, measure_energy
from mcore.observe.steplog.log_state import LogState, log_state_of
from mcore.observe.steplog.microbatches import find_num_microbatches, samples_per_step
from mcore.observe.steplog.step import LogStep, is_on
from mcore.observe.steplog.timer_ticks import TickTimes, timer_names, write_foreign_timers
from mcore.observe.timers import Timers
from mcore.parallel.reductions import reduce_max_stat_across_model_parallel_group

__all__ = ["training_log"]


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
    pg_collection: Any = None,
    log_max_attention_logit: float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Log a step: sums losses, sends scalars to trackers, prints a line to the console.

    All ranks call it after every step, after ``train_state.step`` was incremented. On a step at
    which neither ``tensorboard_log_interval`` nor ``log_interval`` hits, it runs no collective
    and waits for no device. On the others the collectives are: a maximum of the learning rate
    over ``mp``, one all-gather of timers and a barrier over the world, a maximum of memory over
    ``pp``, the sums of MoE metrics and energy; each only where it is asked for and where the group
    has more than one rank.

    Trackers are those that ``global_state`` holds on this rank, usually the last one; that rank
    copies all device values to the host at once. A tracker that fails is a warning. The console
    line comes from the last rank, or the only one.

    Every number may be a Python or NumPy number or a tensor with one element.

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
        ValueError: A loss with more elements than one, a logging interval below 1, or gradient
            norms are asked for without a model.

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
    if getattr(config.logger, "skip_train_metrics_log", False) is True:
        return report_memory_flag
    step = LogStep.of(
        config,
        global_state,
        model,
        skipped_iter=skipped_iter,
        pg_collection=pg_collection,
        loaded_iteration=loaded_iteration,
        seq_length=seq_length,
    )
    call = _Call(config, global_state, step, log_state_of(global_state), total_loss_dict)
    call.note_step(loss_dict)
    if not step.logs:
        call.ask_experts()
        return report_memory_flag
    values = StepValues(
        losses=loss_dict,
        learning_rate=_largest_learning_rate(learning_rate, step),
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=loss_scale,
        grad_norm=grad_norm,
        params_norm=params_norm,
        num_zeros=num_zeros_in_grad,
        max_attention_logit=log_max_attention_logit,
        batch_size=samples_per_step(config, call.num_microbatches),
    )
    times = call.read_timers()
    if step.is_tick:
        call.scalars.add_all(collect_memory(config, step), prefix="memory/")
        add_step_scalars(call.scalars, values, config, global_state, step, model, history_wct)
    texts = call.ask_experts()
    interval = call.measure_interval() if step.is_line else Interval(None)
    call.send(values, times, interval, texts)
    if step.is_line:
        reset_totals(total_loss_dict)
        if report_memory_flag:
            print_memory(config, global_state, step, call.num_microbatches)
            report_memory_flag = step.iteration <= loaded_iteration + 1
        call.log_timers(times)
    return report_memory_flag


def _largest_learning_rate(learning_rate: Any, step: LogStep) -> Any:
    group = step.group("mp")
    if group is None:
        return learning_rate
    return reduce_max_stat_across_model_parallel_group(learning_rate, group)


class _Call:
    """One call of the training log; its methods are steps that all ranks take in one order."""

    def __init__(
        self,
        config: Any,
        global_state: Any,
        step: LogStep,
        state: LogState,
        totals: dict[str, Any],
    ) -> None:
        self.config = config
        self.global_state = global_state
        self.step = step
        self.state = state
        self.totals = totals
        self.scalars = Scalars()
        self.num_microbatches = find_num_microbatches(config, global_state)
        self.timers: Any = getattr(global_state, "timers", None)
        # Read at every step: a monitor that is made when it is first read starts to count then.
        self.energy_monitor = getattr(global_state, "energy_monitor", None)
        self.timer_level = int(as_number(getattr(config.logger, "timing_log_level", 0)) or 0)
        self.model_config = getattr(config, "model", None)
        self.iterations = 0

    def note_step(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Do what every step needs, logged or not; reads no device unless it was skipped."""
        add_step(self.totals, losses, int(self.step.skipped))
        self.iterations = count_iterations(self.totals)
        self.state.clock.note_call()
        self.state.flops.seed(self.global_state, self.step.loaded_iteration)
        self.state.experts.end_step(
            self.global_state,
            self.model_config,
            skipped=self.step.skipped,
            num_microbatches=self.num_microbatches,
        )
        profiling = getattr(self.config, "profiling", None)
        save_snapshot_at_profile_end(profiling, self.step.iteration)

    def read_timers(self) -> TickTimes | None:
        """Gather our timers over the ranks, or have those of another library written."""
        tick = self.step.is_tick and is_on(self.config.logger, "log_timers_to_tensorboard")
        if isinstance(self.timers, Timers):
            return self.state.ticks.gather(
                self.timers, self.timer_level, self.iterations, tick=tick, line=self.step.is_line
            )
        if self.timers is not None and tick:
            try:
                write_foreign_timers(
                    self.timers, self.timer_level, self.global_state, self.iterations
                )
            except Exception as error:
                self.state.warn_once("writing timers", error)
        return None

    def ask_experts(self) -> ExpertTexts:
        """Reduce MoE and MTP metrics into the scalars and the totals."""
        return self.state.experts.collect(
            self.global_state,
            self.model_config,
            self.scalars,
            self.totals,
            num_microbatches=self.num_microbatches,
            skipped=self.step.skipped,
            step_logs=self.step.logs,
            pg_collection=self.step.pg_collection,
        )

    def measure_interval(self) -> Interval:
        """Measure time, operations and energy since the last console line."""
        world_size = self.step.world_size
        seconds = self.state.clock.take_seconds(self.timers, self.iterations)
        flops = self.state.flops.take(self.global_state)
        tflops = flops / seconds / 1e12 if flops is not None and seconds else None
        per_iteration = None if seconds is None else seconds / self.iterations
        interval = Interval(
            per_iteration,
            None if tflops is None else tflops / world_size,
            tflops,
            *measure_energy(self.energy_monitor, self.iterations, per_iteration, world_size),
        )
        add_interval_scalars(self.scalars, interval, self.config)
        return interval

    def send(
        self, values: StepValues, times: TickTimes | None, interval: Interval, texts: ExpertTexts
    ) -> None:
        """Copy what this rank shows to the host, all at once, and show it."""
        print_step_time(interval)
        sinks = self.state.sinks.of(self.global_state)
        prints = self.step.is_line and is_last_rank()
        if not sinks and not prints:
            return
        if sinks and times is not None:
            self.scalars.add_all(times.longest())
        scalars = self.scalars if sinks else Scalars()
        shown = values_for_line(values, self.totals, texts) if prints else {}
        batches, numbers = scalars.read(shown)
        train_state = self.global_state.train_state
        emit(sinks, batches, self.step.iteration, train_state.consumed_train_samples)
        if prints:
            print_console_line(
                numbers,
                self.config,
                train_state,
                values.batch_size,
                self.totals,
                interval,
                texts.ready,
            )

    def log_timers(self, times: TickTimes | None) -> None:
        """Log the times since the last console line, on the last rank."""
        if times is None:
            if self.timers is not None:
                names = list(timer_names(self.timer_level))
                self.timers.log(names, normalizer=self.config.logger.log_interval)
        elif times.since_line is not None and is_last_rank():
            rows = times.since_line.tolist()
            self.timers.log_text(self.timers.format(times.names, rows, self.iterations))
