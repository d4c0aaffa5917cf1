"""The state of a training process: progress, timers, trackers, and the log of a run."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mcore.observe.rank_logging import writes_log
from mcore.observe.reports import EnergyMonitor
from mcore.observe.runs.config import ConfigContainer, DatasetConfig, LoggerConfig, TrainingConfig
from mcore.observe.sinks.base import GuardedSink, MetricSink, TrackerSpec
from mcore.observe.sinks.delivery.process_end import on_process_end, status_of
from mcore.observe.sinks.delivery.tracker_run import TrackerRun, close_together
from mcore.observe.sinks.scalars import Scalars
from mcore.observe.sinks.trackers import (
    TRACKERS,
    emit,
    open_metrics_file,
    open_tracker,
    write_config,
)
from mcore.observe.timers import Timers
from mcore.observe.training_log.log import LOG_STATE, StepCounter, log_state_of
from mcore.observe.training_log.measures import DATA_TIMER
from mcore.observe.training_log.step import StepInput, samples_per_step

_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}


@dataclass
class TrainState:
    """Counters of a run. It is ``Stateful``, so distributed checkpoints save and load it.

    Attributes:
        step: Steps done.
        consumed_train_samples: Samples trained on.
        skipped_train_samples: Samples skipped.
        consumed_valid_samples: Samples validated on.
        floating_point_operations_so_far: Operations of the whole job.
        do_train: Training is enabled.
        do_valid: Validation is enabled.
        do_test: Testing is enabled.

    Example:
        >>> TrainState(step=5).state_dict()["step"]
        tensor(5)
    """

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations_so_far: float = 0
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return one CPU tensor without dimensions for each field.

        Returns:
            int64 for counters, float64 for operations, bool for flags.

        Example:
            >>> TrainState().state_dict()["floating_point_operations_so_far"].dtype
            torch.float64
        """
        return {
            field.name: torch.tensor(getattr(self, field.name), dtype=_DTYPES[str(field.type)])
            for field in fields(self)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the fields that are present.

        Args:
            state_dict: Tensors of one element, or numbers, by field. A missing field gets its
                default. Other keys are ignored.

        Example:
            >>> state = TrainState()
            >>> state.load_state_dict({"step": torch.tensor(7), "unknown": torch.tensor(1)})
            >>> state.step
            7
        """
        for field in fields(self):
            value = state_dict.get(field.name, field.default)
            plain = value.item() if isinstance(value, torch.Tensor) else value
            setattr(self, field.name, plain)


def _open_tracker(spec: TrackerSpec, state: GlobalState) -> Any:
    settings = getattr(state.cfg, "logger", None)
    if not spec.is_wanted(settings) or not writes_log(state):
        return None
    return open_tracker(spec, settings, state.cfg, state._run_ids.pop(spec.attribute, None))


class GlobalState:
    """State of a training process, and the trackers that it writes to.

    The first read of a tracker starts to open it, in the background and on the last rank only. On
    other ranks, or if the configuration does not name it, it is None. Logging never waits for a
    tracker to open or for a server that cannot be reached. The state is a context manager that
    closes the trackers with the status of the block.

    Args:
        cfg: The configuration, :class:`mcore.observe.ConfigContainer` or an object like it. It
            may be assigned later, before the first tracker is read.
        train_state: Progress. None starts at 0.
        extra_sinks: Additional sinks. On the last rank they get every scalar that trackers get,
            on other ranks nothing. :meth:`close` closes them.

    Attributes:
        cfg: The configuration.
        train_state: Progress.
        extra_sinks: Additional sinks.
        writing_rank: The rank that writes, set before the first step. None is the last rank.
        start_time: Start of this process, in seconds of ``time.time()``.
        straggler_timer: A straggler detector for the training loop, or None.
        moe_metrics: The tracker of router metrics, or None for that of the process.
        mtp_metrics: The tracker of multi-token prediction, or None for that of the process.
        tensorboard_logger: A ``SummaryWriter`` or None.
        wandb_logger: A W&B run or None. ``log`` works in the background. Its other attributes, and
            those of the next two, wait until it is open.
        mlflow_logger: An MLflow run or None. ``log_metrics`` works in the background.
        comet_logger: A Comet experiment or None. ``log_metrics`` works in the background.

    Raises:
        ValueError: A tracker is read, but its run has no name.

    Example:
        >>> from mcore.observe import MemorySink
        >>> with GlobalState(extra_sinks=[MemorySink()]) as state:
        ...     state.train_state.step, state.tensorboard_logger
        (0, None)
    """

    tensorboard_logger: Any  # these are set below, for each of TRACKERS
    wandb_logger: Any
    mlflow_logger: Any
    comet_logger: Any

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
        self.writing_rank: int | None = None
        self.start_time = time.time()
        self.straggler_timer: Any = None
        self.moe_metrics: Any = None
        self.mtp_metrics: Any = None
        self._flops_at_last_log: float | None = None
        self._writes_config = False
        self._run_ids: dict[str, str | None] = {}  # by the tracker's attribute
        self._counter = StepCounter()
        self._stop_watching: Callable[[], None] = lambda: None
        if self.extra_sinks:
            self._watch()

    # Each is built at its first read, and may be assigned too.
    @functools.cached_property
    def timers(self) -> Any:
        """The timers, with level and option of the configuration."""
        logger = getattr(self.cfg, "logger", None) or LoggerConfig()
        return Timers(logger.timing_log_level, logger.timing_log_option)

    @functools.cached_property
    def metrics_file(self) -> Any:
        """The :class:`mcore.observe.JsonlSink` in the run's folder, or None."""
        if not writes_log(self):
            return None
        settings, begins_anew = getattr(self.cfg, "logger", None), self._counter.first_step == 0
        file = open_metrics_file(settings, self.start_time if begins_anew else None)
        if file is not None and self._writes_config:
            write_config(settings, self.cfg)
        return file

    @functools.cached_property
    def energy_monitor(self) -> Any:
        """An energy monitor or None, on all ranks or on none. It counts from its first read."""
        wanted = getattr(getattr(self.cfg, "logger", None), "log_energy", False)
        if not wanted or not torch.accelerator.is_available():
            return None
        monitor = EnergyMonitor()
        monitor.setup()
        return monitor

    def _watch(self) -> None:
        """Close the state when the process ends, unless the state was collected before."""
        state = weakref.ref(self)

        def close(status: str) -> None:
            living = state()
            if living is not None:
                living.close(status)

        self._stop_watching()
        self._stop_watching = on_process_end(close)

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
        """Return the sinks of this rank: the trackers and the extra sinks, guarded.

        Returns:
            The sinks, empty on ranks that write nothing.

        Example:
            >>> GlobalState().sinks()
            []
        """
        return [sink for _, sink in log_state_of(self).sinks.of(self)]

    def tracker(self, name: str) -> Any:
        """Return the live object of a tracker's library, for images, histograms and files.

        It waits until the run is open. Metrics still go through the log.

        Args:
            name: ``"tensorboard"``, ``"wandb"``, ``"mlflow"`` or ``"comet"``.

        Returns:
            A ``SummaryWriter``, a W&B run, an ``MlflowClient`` (the id of its run is
            ``mlflow_logger.run_id``) or a Comet experiment. None on ranks that write nothing, after
            :meth:`close`, and if the event files cannot be written.

        Raises:
            ValueError: On all ranks: the name is unknown, or the settings do not turn it on.
            Exception: The tracker cannot be opened.

        Example:
            >>> state = GlobalState(ConfigContainer())
            >>> state.tracker("wandb")
            Traceback (most recent call last):
            ...
            ValueError: this run has no tracker 'wandb': set wandb_project
        """
        spec = next((spec for spec in TRACKERS if spec.name == name), None)
        if spec is None:
            raise ValueError(f"tracker got {name!r}: give one of {[one.name for one in TRACKERS]}")
        if not spec.is_wanted(getattr(self.cfg, "logger", None)):
            raise ValueError(f"this run has no tracker {name!r}: set {spec.wanted_by}")
        client = getattr(self, spec.attribute)
        return client.get_client() if isinstance(client, TrackerRun) else client

    def log_metrics(
        self, metrics: Mapping[str, Any], *, step: int | None = None, versus_samples: bool = True
    ) -> None:
        """Send metrics to all sinks of this rank, without a console line.

        For metrics outside of :func:`mcore.observe.training_log`, such as validation metrics.
        Tensors are copied to the host in one transfer. Does nothing on ranks that write nothing. No
        communication.

        Args:
            metrics: Numbers and tensors of one element, by name.
            step: Their step. None is the current step. The counters do not change.
            versus_samples: TensorBoard also shows them over the samples consumed.

        Example:
            >>> from mcore.observe import MemorySink
            >>> kept = MemorySink()
            >>> state = GlobalState(train_state=TrainState(step=10), extra_sinks=[kept])
            >>> state.log_metrics({"lm loss validation": torch.tensor(2.5)})
            >>> kept.steps
            {10: {'lm loss validation': 2.5}}
        """
        sinks = log_state_of(self).sinks.to_log_to(self)
        if not sinks:
            return
        scalars = Scalars()
        scalars.add_all(metrics, versus_samples=versus_samples)
        batches, _ = scalars.read({})
        at = self.train_state.step if step is None else step
        emit(sinks, batches, at, self.train_state.consumed_train_samples)

    def log_step(
        self,
        losses: Mapping[str, Any] | Any,
        *,
        lr: Any = None,
        grad_norm: Any = None,
        samples: int | None = None,
        tokens: int | None = None,
        steps: int = 1,
        skipped: bool = False,
        model: Any = None,
        pg_collection: Any = None,
        reduce: str = "mean",
        dp_group: Any = None,
        **scalars: Any,
    ) -> None:
        """Count a step and log it. All ranks call it after every step, or every few steps.

        It logs like :func:`mcore.observe.training_log` and keeps the counters, the sums and the
        time stamps of the loop. At a step that logs, the losses of the ranks are reduced by one
        all-gather over the world, the same that the readable line needs.

        Args:
            losses: Losses of the step by name, or one loss, which gets the name ``loss``. The mean
                over data-parallel ranks is logged. The line adds the largest of all ranks if it
                differs.
            lr: Learning rate.
            grad_norm: L2 norm of the gradients.
            samples: Samples of the steps over all ranks. None means the configured batch.
            tokens: Tokens of the steps over all ranks. None means samples times ``seq_length``.
            steps: Steps since the last call. The losses are their average.
            skipped: The optimizer skipped the step.
            model: The model, if its norms are logged or it has the groups.
            pg_collection: The process groups. None is as in :func:`mcore.observe.training_log`.
            reduce: ``"mean"`` or ``"max"`` of the losses over data-parallel ranks, or ``"last"``:
                the last rank's losses.
            dp_group: The data-parallel ranks of this rank. None is the group ``dp`` of the process
                groups, or all ranks without process groups.
            scalars: Further values for the trackers, by name, of the last rank.

        Raises:
            ValueError: ``steps`` is below 1, ``samples`` or ``tokens`` below 0, or ``reduce`` is
                unknown.

        Example:
            >>> from mcore.observe import MemorySink
            >>> kept = MemorySink()
            >>> state = GlobalState(ConfigContainer(), extra_sinks=[kept])
            >>> state.log_step(torch.tensor(2.5), lr=1e-4, accuracy=0.5)
            >>> state.train_state.step, kept.steps[1]["loss"], kept.steps[1]["accuracy"]
            (1, 2.5, 0.5)
        """
        if steps < 1:
            raise ValueError(f"log_step got steps={steps}: give those since the last call")
        for name, count in (("samples", samples), ("tokens", tokens)):
            if count is not None and count < 0:
                raise ValueError(f"log_step got {name}={count}: give those since the last call")
        if reduce not in ("mean", "max", "last"):
            raise ValueError(f"log_step got reduce={reduce!r}: give 'mean', 'max' or 'last'")
        config = self.cfg if self.cfg is not None else ConfigContainer()
        given = StepInput(
            losses=losses if isinstance(losses, Mapping) else {"loss": losses},
            learning_rate=lr,
            loss_scale=1.0,
            grad_norm=grad_norm,
            skipped=skipped,
            steps=steps,
            samples=samples,
            tokens=tokens,
            scalars=scalars,
            model=model,
            pg_collection=pg_collection,
            reduce=reduce,
            dp_group=dp_group,
        )
        self._counter.log(given, config, self)

    def reset_for_restart(self) -> None:
        """Reset the state before training restarts in this process.

        The TensorBoard writer is closed and the W&B run finished. MLflow continues the same run,
        W&B and Comet get new runs. The next read makes trackers, timers and the energy monitor
        anew. Progress is 0 until a checkpoint is loaded. The configuration and the extra sinks
        stay.

        Example:
            >>> state = GlobalState(train_state=TrainState(step=5))
            >>> state.reset_for_restart()
            >>> state.train_state.step
            0
        """
        for tracker in TRACKERS:
            client = vars(self).pop(tracker.attribute, None)
            if client is not None:
                tracker.restart(client)
                if tracker.continues_at_restart:
                    self._run_ids[tracker.attribute] = getattr(client, "run_id", None) or None
        file, monitor = (vars(self).pop(name, None) for name in ("metrics_file", "energy_monitor"))
        if file is not None:
            file.close()
        if monitor is not None:
            monitor.shutdown()
        if hasattr(self.mtp_metrics, "reset"):
            self.mtp_metrics.reset()
        self._counter = StepCounter()
        for name in ("timers", LOG_STATE):
            vars(self).pop(name, None)
        self.train_state = TrainState()
        self.start_time = time.time()
        self._flops_at_last_log = None

    def close(self, status: str = "FINISHED") -> None:
        """Flush and close the trackers and the extra sinks. A second call does nothing.

        Trackers that were never read are not opened. A failure gives a warning, and the others are
        still closed. Trackers that cannot be reached are waited for together, at most ``closing_s``
        of the logger's settings. Metrics not delivered by then stay on disk, and
        ``python -m mcore.observe replay`` sends them. Metrics logged later appear only on the
        console, with one warning. The end of the process closes the state too.

        Args:
            status: The end of the run: ``"FINISHED"``, ``"FAILED"`` or ``"KILLED"``.

        Example:
            >>> GlobalState().close()
        """
        self._stop_watching()
        names = [*(tracker.attribute for tracker in TRACKERS), "metrics_file"]
        for name in names:  # do not open a tracker that was never read
            vars(self).setdefault(name, None)
        runs = [vars(self)[name] for name in names]
        close_together([run for run in runs if isinstance(run, TrackerRun)], status)
        for sink in log_state_of(self).sinks.of(self):
            sink[1].close(status)
        vars(self).update(dict.fromkeys(names))
        for further in () if writes_log(self) else self.extra_sinks:
            GuardedSink(type(further).__name__, further).close(status)
        self.extra_sinks = ()
        if vars(self).get("energy_monitor") is not None:
            self.energy_monitor.shutdown()


for _spec in TRACKERS:
    _client = functools.cached_property(functools.partial(_open_tracker, _spec))
    _client.__set_name__(GlobalState, _spec.attribute)
    setattr(GlobalState, _spec.attribute, _client)


class RunLog(GlobalState):
    """The log of a run: console, ``metrics.jsonl`` in the run's folder, and trackers.

    The settings are written to ``config.json``, without secrets.

    Every rank makes one and calls :meth:`log_step`. The last rank writes. Use a ``with`` block to
    report to trackers how the run ended. To resume, save :meth:`state_dict` with a checkpoint and
    load it before the first step: counters and trackers continue, and metrics logged after the
    checkpoint are dropped if possible. A run that loads nothing is new. If its folder has the
    ``metrics.jsonl`` of an earlier run, that file is renamed, with a WARNING.

    Args:
        run_dir: Folder of the run. ``python -m mcore.observe show`` reads it.
        batch_size: Samples of one step on one rank.
        train_iters: Steps of the whole run, or None.
        seq_length: Tokens of a sample, for tokens per second. None if samples have no fixed length.
        log_every: Steps between lines, and between values of trackers and files. Only these steps
            wait for the device.
        tensorboard: Write event files into the folder ``tensorboard`` of the run.
        mlflow: Address of an MLflow server, or a database such as ``sqlite:///mlflow.db``. MLflow
            is imported in the background. This delays single steps of the first seconds by up to
            0.3 s, unless you import it earlier.
        wandb: A Weights & Biases project.
        config: Your settings (a dict, a dataclass or a namespace), which trackers and the run's
            page show.
        sinks: Additional sinks.
        settings: Further settings of :class:`mcore.observe.LoggerConfig`.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting does not exist.

    Example:
        >>> import tempfile, torch
        >>> with RunLog(tempfile.mkdtemp(), batch_size=8) as log:
        ...     for step in range(1, 4):
        ...         log.log_step({"loss": torch.tensor(1.0 / step)}, lr=1e-3)
        >>> log.train_state.consumed_train_samples
        24
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        batch_size: int = 1,
        train_iters: int | None = None,
        seq_length: int | None = None,
        log_every: int = 10,
        tensorboard: bool = False,
        mlflow: str | None = None,
        wandb: str | None = None,
        config: Any = None,
        sinks: Sequence[MetricSink] = (),
        **settings: Any,
    ) -> None:
        for argument, count in (("batch_size", batch_size), ("seq_length", seq_length)):
            if count is not None and count < 1:
                raise ValueError(f"RunLog got {argument}={count}: give a number of at least 1")
        folder = Path(run_dir)
        name = folder.absolute().name
        chosen: dict[str, Any] = {"run_dir": str(folder), "log_interval": log_every}
        chosen["tensorboard_log_interval"] = log_every
        if tensorboard:
            chosen["tensorboard_dir"] = str(folder / "tensorboard")
        if mlflow is not None:
            chosen |= {"mlflow_run_name": name, "mlflow_tracking_uri": mlflow}
            chosen["mlflow_experiment"] = folder.absolute().parent.name or "runs"
        if wandb is not None:
            chosen |= {"wandb_project": wandb, "wandb_exp_name": name}
            chosen["wandb_save_dir"] = str(folder)
        logger = LoggerConfig(**chosen | settings)
        logger.finalize()
        train = TrainingConfig(micro_batch_size=batch_size, train_iters=train_iters)
        container = ConfigContainer(
            logger=logger, train=train, model=config, dataset=DatasetConfig(seq_length=seq_length)
        )
        train.global_batch_size = samples_per_step(container, 1)
        super().__init__(container, extra_sinks=sinks)
        self._writes_config = True

    @contextmanager
    def data(self) -> Iterator[None]:
        """Measure the wait for data. The console line shows it in percent of the time.

        Example:
            >>> import tempfile
            >>> log = RunLog(tempfile.mkdtemp())
            >>> with log.data():
            ...     batch = [1, 2, 3]
        """
        timer = self.timers(DATA_TIMER, log_level=0)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint.

        Returns:
            Tensors of :class:`mcore.observe.TrainState`.

        Example:
            >>> import tempfile
            >>> RunLog(tempfile.mkdtemp()).state_dict()["step"]
            tensor(0)
        """
        return self.train_state.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a run from the counters of a checkpoint, before the first step is logged.

        Args:
            state_dict: The result of :meth:`state_dict`.

        Example:
            >>> import tempfile
            >>> log = RunLog(tempfile.mkdtemp())
            >>> log.load_state_dict({"step": 7})
            >>> log.cfg.logger.resume_step
            7
        """
        self.train_state.load_state_dict(state_dict)
        self.cfg.logger.resume_step = self.train_state.step
