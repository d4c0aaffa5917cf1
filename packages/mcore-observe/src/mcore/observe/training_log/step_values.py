"""The values that trackers receive at the end of a sink interval and of a console interval."""

from __future__ import annotations

from types import SimpleNamespace

from mcore.observe.norms import gradient_norms
from mcore.observe.reports.memory import report_memory
from mcore.observe.reports.progress import report_runtime, report_throughput
from mcore.observe.sinks.scalars import Scalars, as_number, only_numbers
from mcore.observe.training_log.measures import Interval
from mcore.observe.training_log.step import LogStep, StepInput, is_on
from mcore.parallel.reductions import reduce_max_memory_across_pp_group


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
            train_state,
            step.global_state.start_time,
            step.seq_length,
            step.train_iters,
            logger.runtime_time_unit,
            start_step=values.loaded_iteration,
        )
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
