"""Settings of a run that the log reads: values, intervals, trackers, batch sizes, profiling."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from mcore.observe.rank_logging import warn_once
from mcore.observe.reports import SECONDS_PER_UNIT
from mcore.observe.sinks.secrets import mask_secrets
from mcore.observe.sinks.trackers import TRACKERS

logger = logging.getLogger(__name__)

_NO_EFFECT = "ProfilingConfig.%s has no effect in mcore.observe: %s"

CONSOLE_FORMATS = ("readable", "megatron")


@dataclass
class LoggerConfig:
    """Settings of the training log.

    It has the names of Megatron-Bridge. Any object with these attributes works too.
    Settings that end in ``_to_tensorboard`` apply to every tracker. Settings of "the loop" have no
    effect in the log itself: the training loop reads them.

    Attributes:
        log_interval: Steps between console lines.
        log_params_norm: The loop computes the parameters' L2 norm.
        log_throughput: Show TFLOP/s per GPU in the console line.
        log_throughput_to_tensorboard: Log throughput.
        throughput_window_size: Steps over which samples per second are averaged.
        log_progress: The loop appends to a progress file.
        timing_log_level: Finest level of timers that run, -1 (none) to 2.
        timing_log_option: ``"max"``, ``"minmax"`` or ``"all"`` ranks in the timers' text.
        tensorboard_dir: Folder of event files. None writes none.
        tensorboard_log_interval: Steps between scalars in trackers.
        tensorboard_queue_size: Events that TensorBoard buffers before it writes.
        log_timers_to_tensorboard: Log timers and the time of an iteration.
        log_loss_scale_to_tensorboard: Log the loss scale.
        log_validation_ppl_to_tensorboard: The loop logs validation perplexity.
        log_memory_to_tensorboard: Log memory statistics.
        memory_keys: Statistics as in :func:`mcore.observe.report_memory`. None means the default.
        log_l2_norm_grad_to_tensorboard: Log the gradient norm of every parameter.
        log_num_zeros_in_grad: The loop counts zeros in the gradients.
        log_max_attention_logit: The loop tracks the largest attention logit.
        log_runtime_to_tensorboard: Log elapsed and remaining time.
        runtime_time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.
        log_world_size_to_tensorboard: Log the number of ranks.
        log_energy: Measure energy if the device can.
        skip_train_metrics_log: Log no training metrics at all.
        console_format: ``"readable"``, or ``"megatron"`` for the exact line of Megatron-LM. It is
            ``"megatron"`` for settings without this attribute.
        run_dir: Folder of the run, with ``metrics.jsonl``, the run ids of the trackers, and metrics
            not delivered yet. With None there is no ``metrics.jsonl``, and undelivered metrics are
            kept in ``mcore-spool`` in the current folder.
        resume_step: The step of the checkpoint that the run continues from. Trackers continue their
            runs, and drop metrics of later steps if possible. None starts new runs.
        closing_s: Seconds that the end of the run waits for a tracker that cannot be reached.
        wandb_project: Weights & Biases project. None disables the tracker.
        wandb_exp_name: Name of the W&B run.
        wandb_save_dir: Folder for W&B's files.
        wandb_entity: Owner of the project.
        wandb_run_id: A run to continue. None means that of ``run_dir`` when resuming.
        wandb_log_console: Send the console's output to W&B.
        wandb_log_environment: Send command line, host and packages to W&B.
        mlflow_experiment: MLflow experiment. None disables the tracker.
        mlflow_run_name: Name of the MLflow run.
        mlflow_tracking_uri: Server or database. None means MLFLOW_TRACKING_URI, else SQLite. User
            and password in it are never shown.
        mlflow_tags: Tags of the MLflow run.
        mlflow_description: Note shown with the MLflow run.
        mlflow_run_id: A run to continue. None means that of ``run_dir`` when resuming.
        comet_project: Comet project. None disables the tracker.
        comet_experiment_name: Name of the Comet experiment.
        comet_workspace: Comet workspace.
        comet_api_key: Comet key. None means COMET_API_KEY. Never shown.
        comet_tags: Tags of the experiment.
        comet_log_code: Send the source code and the git patch to Comet.
        comet_log_console: Send the console's output to Comet.
        comet_log_environment: Send command line, host, packages and git commit to Comet.

    Example:
        >>> LoggerConfig(log_interval=10, comet_api_key="secret")  # doctest: +ELLIPSIS
        LoggerConfig(log_interval=10, ...)
    """

    log_interval: int = 100
    log_params_norm: bool = False
    log_throughput: bool = False
    log_throughput_to_tensorboard: bool = False
    throughput_window_size: int = 100
    log_progress: bool = False
    timing_log_level: int = 0
    timing_log_option: str = "minmax"
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    memory_keys: dict[str, str] | None = None
    log_l2_norm_grad_to_tensorboard: bool = False
    log_num_zeros_in_grad: bool = False
    log_max_attention_logit: bool = False
    log_runtime_to_tensorboard: bool = False
    runtime_time_unit: str = "hours"
    log_world_size_to_tensorboard: bool = False
    log_energy: bool = False
    skip_train_metrics_log: bool = False
    console_format: str = "readable"
    run_dir: str | None = None
    resume_step: int | None = None
    closing_s: float = 10.0
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    wandb_run_id: str | None = None
    wandb_log_console: bool = False
    wandb_log_environment: bool = False
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_tags: dict[str, str] | None = None
    mlflow_description: str | None = None
    mlflow_run_id: str | None = None
    comet_project: str | None = None
    comet_experiment_name: str | None = None
    comet_workspace: str | None = None
    comet_api_key: str | None = field(default=None, repr=False)
    comet_tags: list[str] | None = None
    comet_log_code: bool = False
    comet_log_console: bool = False
    comet_log_environment: bool = False

    def __repr__(self) -> str:
        secrets = [self.comet_api_key] if self.comet_api_key else []
        shown = (
            f"{entry.name}={mask_secrets(repr(getattr(self, entry.name)), secrets)}"
            for entry in fields(self)
            if entry.repr
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def finalize(self) -> None:
        """Check the settings and that the configured trackers are installed.

        Raises:
            ValueError: An interval below 1, an unknown option or unit, a timer level outside
                -1..2, or a project or experiment without the name of its run.
            ModuleNotFoundError: A configured tracker is not installed. The message names the extra.

        Example:
            >>> LoggerConfig(log_interval=0).finalize()
            Traceback (most recent call last):
            ...
            ValueError: log_interval is 0: give 1 step or more
        """
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 step or more")
        for name, options in (
            ("timing_log_level", (-1, 0, 1, 2)),
            ("timing_log_option", ("max", "minmax", "all")),
            ("console_format", CONSOLE_FORMATS),
            ("runtime_time_unit", tuple(SECONDS_PER_UNIT)),
        ):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give one of {list(options)}")
        if self.closing_s < 0:
            raise ValueError(f"closing_s is {self.closing_s}: give 0 seconds or more")
        for spec in TRACKERS:
            if spec.is_wanted(self):
                spec.require()


@dataclass
class TrainingConfig:
    """Batch sizes and length of a training run.

    Any object with these attributes works too.

    Attributes:
        micro_batch_size: Samples of one forward pass on one data-parallel rank.
        global_batch_size: Samples of one step over all data-parallel ranks and microbatches.
        train_iters: Steps of the whole run, or None if it has no fixed length.
        num_microbatches: Forward passes of one step on one rank. None derives it.
        data_parallel_size: Data-parallel ranks. None means the process groups.

    Example:
        >>> TrainingConfig(micro_batch_size=2, global_batch_size=64, train_iters=1000).train_iters
        1000
    """

    micro_batch_size: int = 1
    global_batch_size: int = 1
    train_iters: int | None = None
    num_microbatches: int | None = None
    data_parallel_size: int | None = None


@dataclass
class ProfilingConfig:
    """Steps and ranks of a profile, and snapshots of the allocator.

    It has the names of Megatron-Bridge. The log saves memory snapshots but runs no profiler: the
    training loop does.

    Attributes:
        use_nsys_profiler: The loop profiles with Nsight Systems.
        use_pytorch_profiler: The loop profiles with ``torch.profiler``.
        profile_step_start: First step of the loop's profile.
        profile_step_end: Last step of the profile. The memory snapshot is saved at this step.
        profile_ranks: Global ranks that profile. Empty means none.
        record_memory_history: Record the allocator's history and save snapshots of it.
        memory_snapshot_path: File of the snapshots. The rank is added before the extension.
        record_shapes: Accepted for Megatron-Bridge, no effect here: pass ``record_shapes`` to
            ``torch.profiler.profile``.
        nvtx_ranges: Accepted for Megatron-Bridge, no effect here: call
            :func:`mcore.observe.configure_nvtx_profiling`.

    Example:
        >>> ProfilingConfig(profile_step_start=5, profile_step_end=8).finalize()
    """

    use_nsys_profiler: bool = False
    use_pytorch_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"
    record_shapes: bool = False
    nvtx_ranges: bool = False

    def finalize(self) -> None:
        """Check the settings against each other, and warn once of settings without effect.

        Raises:
            ValueError: Both profilers are on, a step is negative, or the end is before the start.

        Example:
            >>> ProfilingConfig(profile_step_start=-1).finalize()
            Traceback (most recent call last):
            ...
            ValueError: profile_step_start is -1: give a step of 0 or more
        """
        if self.record_shapes:
            remedy = "pass record_shapes=True to torch.profiler.profile"
            warn_once(logger, _NO_EFFECT, "record_shapes", remedy)
        if self.nvtx_ranges:
            remedy = "call mcore.observe.configure_nvtx_profiling(True)"
            warn_once(logger, _NO_EFFECT, "nvtx_ranges", remedy)
        if self.use_nsys_profiler and self.use_pytorch_profiler:
            raise ValueError(
                "use_nsys_profiler and use_pytorch_profiler are both on: choose one of them"
            )
        for name in ("profile_step_start", "profile_step_end"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a step of 0 or more")
        if self.profile_step_end < self.profile_step_start:
            raise ValueError(
                f"profile_step_end is {self.profile_step_end}, before profile_step_start "
                f"{self.profile_step_start}: give the same step or a later one"
            )


@dataclass
class DatasetConfig:
    """The settings of the data that the log reads.

    Attributes:
        seq_length: Tokens of one sample. None or 0 if samples have no fixed length.

    Example:
        >>> DatasetConfig(seq_length=2048).seq_length
        2048
    """

    seq_length: int | None = None


@dataclass
class ConfigContainer:
    """The settings of a run that :func:`mcore.observe.training_log` reads.

    Any object with these attributes works too. Only ``logger`` and ``train`` are required.

    Attributes:
        logger: Values, intervals and trackers of the log.
        train: Batch sizes and length of the run.
        profiling: Profiling, or None.
        model: The model's configuration. ``num_moe_experts`` and ``mtp_num_layers`` decide whether
            their metrics are logged.
        dataset: An object with ``seq_length``.
        optimizer: An object with ``decoupled_lr``, or None.
        data_parallel_size: Data-parallel ranks. None means the number in ``train``, else
            the size of the group ``dp``, else all ranks of the job.

    Example:
        >>> ConfigContainer(logger=LoggerConfig(log_interval=10)).logger.log_interval
        10
    """

    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    profiling: ProfilingConfig | None = None
    model: Any = None
    dataset: Any = field(default_factory=DatasetConfig)
    optimizer: Any = None
    data_parallel_size: int | None = None

    def finalize(self) -> None:
        """Check the parts that can be checked.

        Raises:
            ValueError: A setting is out of range or contradicts another one.
            ModuleNotFoundError: A configured tracker is not installed. The message names the extra.

        Example:
            >>> ConfigContainer().finalize()
        """
        self.logger.finalize()
        if self.profiling is not None:
            self.profiling.finalize()
