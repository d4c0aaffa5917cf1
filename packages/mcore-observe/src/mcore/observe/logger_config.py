"""What a training run logs, how often and to which trackers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from mcore.observe.extras import require_extra
from mcore.observe.progress import SECONDS_PER_UNIT
from mcore.observe.secret_texts import mask_secrets

__all__ = ["LoggerConfig"]

# Tracker, the setting that asks for it, the name that it then needs.
_NAMED_RUNS = (
    ("wandb", "wandb_project", "wandb_exp_name"),
    ("mlflow", "mlflow_experiment", "mlflow_run_name"),
    ("comet", "comet_project", "comet_experiment_name"),
)


@dataclass
class LoggerConfig:
    """Settings of the training log.

    The names are those of Megatron-Bridge. Any object with these attributes serves as well.
    Settings that end in ``_to_tensorboard`` hold for every tracker.

    Attributes:
        log_interval: Steps between console lines.
        log_params_norm: The loop computes the parameters' L2 norm.
        log_throughput: Show TFLOP/s per GPU in the console line.
        log_throughput_to_tensorboard: Log throughput.
        throughput_window_size: Steps over which samples per second are averaged.
        log_progress: The loop appends to a progress file.
        timing_log_level: Finest level of timers that run, -1 (none) to 2.
        timing_log_option: ``"max"``, ``"minmax"`` or ``"all"`` ranks in the timers' text.
        tensorboard_dir: Folder of event files; None writes none.
        tensorboard_log_interval: Steps between scalars in trackers.
        tensorboard_queue_size: Events that TensorBoard holds back before it writes.
        log_timers_to_tensorboard: Log timers and the time of an iteration.
        log_loss_scale_to_tensorboard: Log the loss scale.
        log_validation_ppl_to_tensorboard: The loop logs validation perplexity.
        log_memory_to_tensorboard: Log memory statistics.
        memory_keys: Which, as in :func:`mcore.observe.report_memory`; None for the default.
        log_l2_norm_grad_to_tensorboard: Log the gradient norm of every parameter.
        log_num_zeros_in_grad: The loop counts zeros in the gradients.
        log_max_attention_logit: The loop tracks the largest attention logit.
        log_runtime_to_tensorboard: Log elapsed and remaining time.
        runtime_time_unit: ``"seconds"``, ``"minutes"``, ``"hours"`` or ``"days"``.
        log_world_size_to_tensorboard: Log the number of ranks.
        log_energy: Measure energy where the device can.
        skip_train_metrics_log: Log no training metrics at all.
        wandb_project: Weights & Biases project; None uses none.
        wandb_exp_name: Name of the run there.
        wandb_save_dir: Where its files go.
        wandb_entity: Who owns the project.
        mlflow_experiment: MLflow experiment; None uses none.
        mlflow_run_name: Name of the run there.
        mlflow_tracking_uri: Server or database; None takes MLFLOW_TRACKING_URI, else SQLite. User
            and password in it are never shown.
        mlflow_tags: Tags of the run.
        mlflow_description: Note shown with the run.
        comet_project: Comet project; None uses none.
        comet_experiment_name: Name of the experiment there.
        comet_workspace: Comet workspace.
        comet_api_key: Comet key; None takes COMET_API_KEY. Never shown.
        comet_tags: Tags of the experiment.

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
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_tags: dict[str, str] | None = None
    mlflow_description: str | None = None
    comet_project: str | None = None
    comet_experiment_name: str | None = None
    comet_workspace: str | None = None
    comet_api_key: str | None = field(default=None, repr=False)
    comet_tags: list[str] | None = None

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
            ModuleNotFoundError: A configured tracker is not installed; names the extra.

        Example:
            >>> LoggerConfig(log_interval=0).finalize()
            Traceback (most recent call last):
            ...
            ValueError: log_interval is 0; give 1 step or more
        """
        self._check_ranges()
        for tracker, asks, names in _NAMED_RUNS:
            require_run_name(self, asks, names)
            if getattr(self, asks) is not None:
                require_extra(tracker, asks)
        if self.tensorboard_dir is not None:
            require_extra("tensorboard", "tensorboard_dir")

    def _check_ranges(self) -> None:
        for name in ("log_interval", "tensorboard_log_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 step or more")
        if self.timing_log_level not in (-1, 0, 1, 2):
            raise ValueError(f"timing_log_level is {self.timing_log_level}; give -1, 0, 1 or 2")
        if self.timing_log_option not in ("max", "minmax", "all"):
            raise ValueError(
                f"timing_log_option is {self.timing_log_option!r}; give 'max', 'minmax' or 'all'"
            )
        if self.runtime_time_unit not in SECONDS_PER_UNIT:
            raise ValueError(
                f"runtime_time_unit is {self.runtime_time_unit!r}; "
                f"give one of {list(SECONDS_PER_UNIT)}"
            )


def require_run_name(logger: object, asks: str, names: str) -> None:
    """Raise ValueError when a tracker is asked for without the name of its run.

    Args:
        logger: The logger settings, any object with the two attributes.
        asks: The attribute that asks for the tracker, such as ``"wandb_project"``.
        names: The attribute that names the run, such as ``"wandb_exp_name"``.

    Raises:
        ValueError: The first is set and the second is missing or empty.

    Example:
        >>> require_run_name(LoggerConfig(), "wandb_project", "wandb_exp_name")
    """
    wanted = getattr(logger, asks, None)
    if wanted is not None and not getattr(logger, names, None):
        raise ValueError(f"{asks} is {wanted!r} but {names} is missing; give the run a name")
