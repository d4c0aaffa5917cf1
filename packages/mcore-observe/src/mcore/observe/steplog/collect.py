"""Collects the scalars of a step that trackers show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mcore.observe.host_reads import as_number
from mcore.observe.memory import report_memory
from mcore.observe.norms import gradient_norms
from mcore.observe.progress import report_runtime, report_throughput
from mcore.observe.scalars import Scalars
from mcore.observe.steplog.interval import Interval
from mcore.observe.steplog.step import LogStep, is_on
from mcore.parallel.reductions import reduce_max_memory_across_pp_group

__all__ = ["StepValues", "add_interval_scalars", "add_step_scalars", "collect_memory"]


@dataclass(frozen=True)
class StepValues:
    """What the training loop hands over for a step: numbers, tensors of one element, or None.

    Attributes:
        losses: The step's losses.
        learning_rate: Learning rate, the largest over the model-parallel ranks.
        decoupled_learning_rate: That of the parameters with a rate of their own.
        loss_scale: Loss scale.
        grad_norm: L2 norm of the gradients.
        params_norm: L2 norm of the parameters.
        num_zeros: Zeros in the gradients.
        max_attention_logit: Largest attention logit.
        batch_size: Samples of the step over the whole job.
    """

    losses: Mapping[str, Any]
    learning_rate: Any
    decoupled_learning_rate: Any
    loss_scale: Any
    grad_norm: Any
    params_norm: Any
    num_zeros: Any
    max_attention_logit: Any
    batch_size: int


def collect_memory(config: Any, step: LogStep) -> dict[str, float | int]:
    """Report the memory of this rank, or the most over the pipeline.

    One all-reduce over ``pp`` if it has more than one rank; all its ranks call it.

    Args:
        config: The configuration.
        step: The step.

    Returns:
        Values by name as in :func:`mcore.observe.report_memory`; empty when not asked for.
    """
    if not is_on(config.logger, "log_memory_to_tensorboard"):
        return {}
    report = report_memory(getattr(config.logger, "memory_keys", None))
    pp_group = step.group("pp")
    return report if pp_group is None else reduce_max_memory_across_pp_group(report, pp_group)


def add_step_scalars(
    scalars: Scalars,
    values: StepValues,
    config: Any,
    global_state: Any,
    step: LogStep,
    model: Any,
    history_wct: Any,
) -> None:
    """Collect the scalars that come at every tick of the trackers; copies nothing to the host.

    No communication, unless gradients are DTensors and their norms are asked for.

    Args:
        scalars: Gets the scalars.
        values: What the training loop handed over.
        config: The configuration.
        global_state: The state.
        step: The step.
        model: The model chunks, or None.
        history_wct: Time stamps of the last steps, or None.
    """
    logger, train_state = config.logger, global_state.train_state
    if is_on(logger, "log_throughput_to_tensorboard"):
        window = logger.throughput_window_size
        # The configuration has the size at the end of a ramp, the step its own.
        sizes = SimpleNamespace(
            micro_batch_size=config.train.micro_batch_size, global_batch_size=values.batch_size
        )
        scalars.add_all(
            report_throughput(sizes, step.iteration, step.seq_length, history_wct, window)
        )
    if is_on(logger, "log_runtime_to_tensorboard"):
        scalars.add_all(_runtime(config, global_state, step))
    if is_on(logger, "log_l2_norm_grad_to_tensorboard"):
        if model is None:
            raise ValueError("log_l2_norm_grad_to_tensorboard is on: give the model, not None")
        scalars.add_all(gradient_norms(model))
    scalars.add("samples vs steps", as_number(train_state.consumed_train_samples))
    scalars.add("learning-rate", values.learning_rate, versus_samples=True)
    if getattr(getattr(config, "optimizer", None), "decoupled_lr", None) is not None:
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
    """Collect the scalars that come with a console line.

    Args:
        scalars: Gets the scalars.
        interval: Figures of the interval.
        config: The configuration.
    """
    if is_on(config.logger, "log_throughput_to_tensorboard"):
        scalars.add("throughput/tflops/device", interval.tflops_per_device)
        scalars.add("throughput/tflops", interval.tflops)
    if is_on(config.logger, "log_timers_to_tensorboard"):
        scalars.add("iteration-time", interval.seconds_per_iteration)
    scalars.add("iter-energy/gpu", interval.joules_per_iteration)
    scalars.add("power/gpu", interval.watts)


def _runtime(config: Any, global_state: Any, step: LogStep) -> dict[str, float | int]:
    train_iters = as_number(getattr(config.train, "train_iters", None))
    return report_runtime(
        global_state.train_state,
        global_state.start_time,
        step.seq_length,
        None if train_iters is None else int(train_iters),
        config.logger.runtime_time_unit,
        start_step=step.loaded_iteration,
    )
