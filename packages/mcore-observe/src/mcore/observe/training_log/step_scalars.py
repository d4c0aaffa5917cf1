"""The scalars that sinks get at the end of a sink interval and of a console interval."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mcore.observe.norms import gradient_norms
from mcore.observe.reports.memory import report_memory
from mcore.observe.reports.progress import report_runtime, report_throughput
from mcore.observe.sinks.scalars import Scalars, as_number
from mcore.observe.training_log.interval import Interval
from mcore.observe.training_log.step import LogStep, StepValues, is_on
from mcore.parallel.reductions import reduce_max_memory_across_pp_group


def add_step_scalars(
    scalars: Scalars, values: StepValues, step: LogStep, model: Any, history_wct: Any
) -> None:
    """Collect the scalars of a step; copies nothing to the host.

    All ranks call it: memory, where requested, is the maximum over ``pp``, and norms of DTensor
    gradients are summed over their shards.
    """
    logger, train_state = step.config.logger, step.global_state.train_state
    if is_on(logger, "log_memory_to_tensorboard"):
        scalars.add_all(_memory(step), prefix="memory/")
    if is_on(logger, "log_throughput_to_tensorboard"):
        # The configuration has the size at the end of a ramp, the step its own.
        sizes = SimpleNamespace(
            micro_batch_size=step.config.train.micro_batch_size, global_batch_size=values.batch_size
        )
        window = logger.throughput_window_size
        scalars.add_all(
            report_throughput(sizes, step.iteration, step.seq_length, history_wct, window)
        )
    if is_on(logger, "log_runtime_to_tensorboard"):
        scalars.add_all(_runtime(step))
    if is_on(logger, "log_l2_norm_grad_to_tensorboard"):
        if model is None:
            raise ValueError("log_l2_norm_grad_to_tensorboard is on: give the model, not None")
        scalars.add_all(gradient_norms(model))
    scalars.add("samples vs steps", as_number(train_state.consumed_train_samples))
    scalars.add("learning-rate", values.learning_rate, versus_samples=True)
    if getattr(getattr(step.config, "optimizer", None), "decoupled_lr", None) is not None:
        scalars.add("decoupled-learning-rate", values.decoupled_learning_rate)
    if as_number(getattr(train_state, "skipped_train_samples", 0)):
        scalars.add("skipped-train-samples", train_state.skipped_train_samples)
    scalars.add("batch-size", values.batch_size, versus_samples=True)
    for name, loss in values.losses.items():
        scalars.add(name, loss, versus_samples=True)
    if is_on(logger, "log_loss_scale_to_tensorboard"):
        scalars.add("loss-scale", values.loss_scale, versus_samples=True)
    if is_on(logger, "log_world_size_to_tensorboard"):
        scalars.add("world-size", step.world_size, versus_samples=True)
    scalars.add("grad-norm", values.grad_norm, versus_samples=True)
    scalars.add("num-zeros", values.num_zeros, versus_samples=True)
    scalars.add("params-norm", values.params_norm, versus_samples=True)
    scalars.add("max-attention-logit", values.max_attention_logit, versus_samples=True)


def add_interval_scalars(scalars: Scalars, interval: Interval, config: Any) -> None:
    """Collect the scalars that come with a console line."""
    if is_on(config.logger, "log_throughput_to_tensorboard"):
        scalars.add("throughput/tflops/device", interval.tflops_per_device)
        scalars.add("throughput/tflops", interval.tflops)
    if is_on(config.logger, "log_timers_to_tensorboard"):
        scalars.add("iteration-time", interval.seconds_per_iteration)
    scalars.add("iter-energy/gpu", interval.joules_per_iteration)
    scalars.add("power/gpu", interval.watts)


def _memory(step: LogStep) -> dict[str, float | int]:
    report = report_memory(getattr(step.config.logger, "memory_keys", None))
    pp_group = step.group("pp")
    return report if pp_group is None else reduce_max_memory_across_pp_group(report, pp_group)


def _runtime(step: LogStep) -> dict[str, float | int]:
    return report_runtime(
        step.global_state.train_state,
        step.global_state.start_time,
        step.seq_length,
        step.train_iters,
        step.config.logger.runtime_time_unit,
        start_step=step.loaded_iteration,
    )
