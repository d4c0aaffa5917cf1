"""Containers of what the logs read about a run: training sizes, profiling, and the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore.observe.logger_config import LoggerConfig

__all__ = ["ConfigContainer", "DatasetConfig", "ProfilingConfig", "TrainingConfig"]


@dataclass
class TrainingConfig:
    """Batch sizes and length of a training run.

    Any object with these attributes serves as well.

    Attributes:
        micro_batch_size: Samples of one forward pass on one data-parallel rank.
        global_batch_size: Samples of one step over all data-parallel ranks and microbatches.
        train_iters: Steps of the whole run, or None when it ends otherwise.
        num_microbatches: Forward passes of one step on one rank; None derives it.
        data_parallel_size: Data-parallel ranks; None when the container around it says so.

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
    """What to profile, when, and on which ranks.

    Attributes:
        use_nsys_profiler: The run is watched by Nsight Systems.
        use_pytorch_profiler: The run uses ``torch.profiler``.
        profile_step_start: First step of the profile.
        profile_step_end: Last step of the profile; the memory snapshot is saved then.
        profile_ranks: Global ranks that profile; empty means none.
        record_memory_history: Record the allocator's history and save snapshots of it.
        memory_snapshot_path: Where snapshots go; the rank is put before the extension.
        record_shapes: Record tensor shapes.
        nvtx_ranges: Open NVTX ranges.

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
        """Check the settings against each other.

        Raises:
            ValueError: Both profilers are on, a step is negative, or the end is before the start.

        Example:
            >>> ProfilingConfig(profile_step_start=-1).finalize()
            Traceback (most recent call last):
            ...
            ValueError: profile_step_start is -1; give a step of 0 or more
        """
        if self.use_nsys_profiler and self.use_pytorch_profiler:
            raise ValueError(
                "use_nsys_profiler and use_pytorch_profiler are both on; choose one of them"
            )
        for name in ("profile_step_start", "profile_step_end"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a step of 0 or more")
        if self.profile_step_end < self.profile_step_start:
            raise ValueError(
                f"profile_step_end is {self.profile_step_end}, before profile_step_start "
                f"{self.profile_step_start}; give the same step or a later one"
            )


@dataclass
class DatasetConfig:
    """What the logs read about the data.

    Attributes:
        seq_length: Tokens of one sample; None or 0 when samples have no length.

    Example:
        >>> DatasetConfig(seq_length=2048).seq_length
        2048
    """

    seq_length: int | None = None


@dataclass
class ConfigContainer:
    """All that :func:`mcore.observe.training_log` reads about a run.

    Any object with these attributes serves as well, as do objects with some of them missing.

    Attributes:
        logger: What to log, how often and where.
        train: Batch sizes and length of the run.
        profiling: Profiling, or None.
        model: The model's configuration; ``num_moe_experts`` and ``mtp_num_layers`` are read.
        dataset: Something with ``seq_length``.
        optimizer: Something with ``decoupled_lr``, or None.
        data_parallel_size: Data-parallel ranks; None takes that of ``train``, else 1.

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
            ModuleNotFoundError: A configured tracker is not installed; names the extra.

        Example:
            >>> ConfigContainer().finalize()
        """
        self.logger.finalize()
        if self.profiling is not None:
            self.profiling.finalize()
