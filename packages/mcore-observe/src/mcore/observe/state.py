"""The state of a training process: progress, timers, trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from mcore.observe.config_params import config_params
from mcore.observe.energy import EnergyMonitor
from mcore.observe.logger_config import LoggerConfig, require_run_name
from mcore.observe.process_end import status_of
from mcore.observe.rank_logging import is_last_rank
from mcore.observe.run_config import ConfigContainer
from mcore.observe.sinks.comet import open_comet
from mcore.observe.sinks.guarded import GuardedSink
from mcore.observe.sinks.mlflow_run import MlflowRun, open_mlflow
from mcore.observe.sinks.protocol import MetricSink
from mcore.observe.sinks.scalars import Scalars
from mcore.observe.sinks.tensorboard import open_tensorboard
from mcore.observe.sinks.wandb import open_wandb
from mcore.observe.timers import Timers
from mcore.observe.trackers import TRACKERS, emit
from mcore.observe.train_state import TrainState
from mcore.observe.training_log.log import LOG_STATE, log_state_of

__all__ = ["GlobalState", "TrainState"]


class _Lazy:
    """An attribute that is built when it is first read, None included; it may be assigned too."""

    def __init__(self, build: Callable[[GlobalState], Any]) -> None:
        self._build = build

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: GlobalState | None, owner: type) -> Any:
        if state is None:
            return self
        if self._name not in state._built:
            state._built[self._name] = self._build(state)
        return state._built[self._name]

    def __set__(self, state: GlobalState, value: Any) -> None:
        state._built[self._name] = value


def _logger_of(state: GlobalState) -> Any:
    return getattr(state.cfg, "logger", None)


def _build_timers(state: GlobalState) -> Timers:
    logger = _logger_of(state) or LoggerConfig()
    return Timers(logger.timing_log_level, logger.timing_log_option)


def _build_tensorboard(state: GlobalState) -> Any:
    logger = _logger_of(state)
    log_dir = getattr(logger, "tensorboard_dir", None)
    if log_dir is None or not is_last_rank():
        return None
    return open_tensorboard(log_dir, logger.tensorboard_queue_size)


def _build_wandb(state: GlobalState) -> Any:
    logger = _logger_of(state)
    require_run_name(logger, "wandb_project", "wandb_exp_name")
    if getattr(logger, "wandb_project", None) is None or not is_last_rank():
        return None
    return open_wandb(
        logger.wandb_project,
        logger.wandb_exp_name,
        save_dir=logger.wandb_save_dir,
        entity=logger.wandb_entity,
        config=config_params(state.cfg),
    )


def _build_mlflow(state: GlobalState) -> Any:
    logger = _logger_of(state)
    require_run_name(logger, "mlflow_experiment", "mlflow_run_name")
    if getattr(logger, "mlflow_experiment", None) is None or not is_last_rank():
        return None
    continued = state._mlflow_run_id
    run = open_mlflow(
        logger.mlflow_experiment,
        logger.mlflow_run_name,
        tracking_uri=logger.mlflow_tracking_uri,
        tags=logger.mlflow_tags,
        description=logger.mlflow_description,
        params=None if continued else config_params(state.cfg),
        run_id=continued,
    )
    state._mlflow_run_id = run.run_id
    return run


def _build_comet(state: GlobalState) -> Any:
    logger = _logger_of(state)
    require_run_name(logger, "comet_project", "comet_experiment_name")
    if getattr(logger, "comet_project", None) is None or not is_last_rank():
        return None
    return open_comet(
        logger.comet_project,
        logger.comet_experiment_name,
        workspace=logger.comet_workspace,
        api_key=logger.comet_api_key,
        tags=logger.comet_tags,
        config=config_params(state.cfg),
    )


def _build_energy_monitor(state: GlobalState) -> EnergyMonitor | None:
    wanted = getattr(_logger_of(state), "log_energy", False)
    if not wanted or not torch.accelerator.is_available():
        return None
    monitor = EnergyMonitor()
    monitor.setup()
    return monitor


class GlobalState:
    """What a training process knows of its run, and the trackers that the run writes to.

    Trackers are opened when they are first read, on the last rank only; elsewhere, and where the
    configuration names none, they are None. It is a context manager, which closes the trackers
    with the right status.

    Args:
        cfg: The configuration, :class:`mcore.observe.ConfigContainer` or an object like it. It
            may be assigned later, before the first tracker is read.
        train_state: Progress; None starts at 0.
        extra_sinks: Further places that get every scalar the trackers get, on each rank that
            is given any: pass them on the last rank. :meth:`close` closes them.

    Attributes:
        cfg: The configuration.
        train_state: Progress.
        extra_sinks: Further places for scalars.
        start_time: When this process started, in seconds of ``time.time()``.
        straggler_timer: A straggler detector, or None; the training loop's own.
        moe_metrics: The tracker of router metrics, or None for that of the process.
        mtp_metrics: The tracker of multi-token prediction, likewise.
        timers: The timers, with level and option of the configuration.
        tensorboard_logger: A ``SummaryWriter`` or None.
        wandb_logger: A W&B run or None.
        mlflow_logger: An MLflow run or None.
        comet_logger: A Comet experiment or None.
        energy_monitor: An energy monitor or None; on all ranks or on none. It counts from when
            it is first read.

    Raises:
        ValueError: When a tracker is read whose run has no name.
        ModuleNotFoundError: When a tracker is read that is not installed; names the extra.

    Example:
        >>> from mcore.observe.sinks.memory import MemorySink
        >>> with GlobalState(extra_sinks=[MemorySink()]) as state:
        ...     state.train_state.step, state.tensorboard_logger
        (0, None)
    """

    timers: Any = _Lazy(_build_timers)
    tensorboard_logger: Any = _Lazy(_build_tensorboard)
    wandb_logger: Any = _Lazy(_build_wandb)
    mlflow_logger: Any = _Lazy(_build_mlflow)
    comet_logger: Any = _Lazy(_build_comet)
    energy_monitor: Any = _Lazy(_build_energy_monitor)

    def __init__(
        self,
        cfg: ConfigContainer | Any = None,
        *,
        train_state: TrainState | None = None,
        extra_sinks: Sequence[MetricSink] = (),
    ) -> None:
        self.cfg = cfg
        self.train_state = TrainState() if train_state is None else train_state
        self.extra_sinks: tuple[MetricSink, ...] = tuple(extra_sinks)
        self.start_time = time.time()
        self.straggler_timer: Any = None
        self.moe_metrics: Any = None
        self.mtp_metrics: Any = None
        self._flops_at_last_log: float | None = None
        self._mlflow_run_id: str | None = None
        self._built: dict[str, Any] = {}

    def __enter__(self) -> GlobalState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(status_of(error))

    def sinks(self) -> list[GuardedSink]:
        """Return where this rank's metrics go: the trackers and the extra sinks, guarded.

        Returns:
            The sinks; empty on ranks that write nothing.

        Example:
            >>> GlobalState().sinks()
            []
        """
        return [sink for _, sink in log_state_of(self).sinks.of(self)]

    def log_metrics(self, metrics: Mapping[str, Any], *, versus_samples: bool = True) -> None:
        """Send metrics of the present step to all sinks of this rank.

        For what a loop logs besides :func:`mcore.observe.training_log`, such as validation.
        Tensors are copied to the host at once; does nothing on ranks that write nothing. No
        communication.

        Args:
            metrics: Numbers and tensors of one element, by name.
            versus_samples: TensorBoard also shows them over the samples consumed.

        Example:
            >>> from mcore.observe.sinks.memory import MemorySink
            >>> kept = MemorySink()
            >>> state = GlobalState(train_state=TrainState(step=10), extra_sinks=[kept])
            >>> state.log_metrics({"lm loss validation": torch.tensor(2.5)})
            >>> kept.steps
            {10: {'lm loss validation': 2.5}}
        """
        sinks = log_state_of(self).sinks.of(self)
        if not sinks:
            return
        scalars = Scalars()
        for name, value in metrics.items():
            scalars.add(name, value, versus_samples=versus_samples)
        batches, _ = scalars.read({})
        emit(sinks, batches, self.train_state.step, self.train_state.consumed_train_samples)

    def reset_for_restart(self) -> None:
        """Forget what belongs to this start of training, before training starts again here.

        The TensorBoard writer is closed; MLflow continues the same run. Trackers, timers and the
        energy monitor are made anew when they are read. Progress starts at 0, until a checkpoint
        is loaded; the configuration and the extra sinks stay.

        Example:
            >>> state = GlobalState(train_state=TrainState(step=5))
            >>> state.reset_for_restart()
            >>> state.train_state.step
            0
        """
        writer = self._built.get("tensorboard_logger")
        if writer is not None:
            writer.close()
        run = self._built.get("mlflow_logger")
        if isinstance(run, MlflowRun):
            run.release()
        if self._built.get("energy_monitor") is not None:
            self._built["energy_monitor"].shutdown()
        if hasattr(self.mtp_metrics, "reset"):
            self.mtp_metrics.reset()
        self._built.clear()
        self.__dict__.pop(LOG_STATE, None)
        self.train_state = TrainState()
        self.start_time = time.time()
        self._flops_at_last_log = None

    def close(self, status: str = "FINISHED") -> None:
        """Flush and close the trackers and the extra sinks; closing twice is fine.

        Those that were never read are not opened. A failure is a warning, and the others are
        closed all the same.

        Args:
            status: How MLflow shows the run: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.

        Example:
            >>> GlobalState().close()
        """
        run = self._built.get("mlflow_logger")
        if isinstance(run, MlflowRun):
            run.status = status
        for tracker in TRACKERS:  # what was never read is not to be opened now
            self._built.setdefault(tracker.attribute, None)
        for sink in self.sinks():
            sink.close()
        self._built.update(dict.fromkeys((t.attribute for t in TRACKERS), None))
        self.extra_sinks = ()
        if self._built.get("energy_monitor") is not None:
            self._built["energy_monitor"].shutdown()
