"""Straggler detection, training logs, timers and metric sinks for distributed training."""

from mcore.observe._version import __version__
from mcore.observe.async_tasks import get_asyncio_loop, trace_async_exceptions
from mcore.observe.experts import (
    MoEMetricsTracker,
    MTPMetricsTracker,
    _build_moe_metric_writer,
    _MoeMetricFanoutWriter,
    get_moe_metrics_tracker,
    get_mtp_metrics_tracker,
)
from mcore.observe.norms import (
    calc_dtensor_params_l2_norm,
    calc_params_l2_norm,
    report_l2_norm_grad,
)
from mcore.observe.nvtx import (
    configure_nvtx_profiling,
    nvtx_decorator,
    nvtx_range,
    nvtx_range_pop,
    nvtx_range_push,
)
from mcore.observe.process.process_end import status_of
from mcore.observe.rank_logging import (
    log_on_each_pipeline_stage,
    log_single_rank,
    safe_get_rank,
    safe_get_world_size,
)
from mcore.observe.reports.energy import EnergyMonitor
from mcore.observe.reports.memory import (
    MEMORY_KEYS,
    MEMORY_KEYS_TABLE,
    report_memory,
    start_memory_history_recording,
)
from mcore.observe.reports.progress import report_runtime, report_throughput
from mcore.observe.runs.config import (
    ConfigContainer,
    DatasetConfig,
    LoggerConfig,
    ProfilingConfig,
    TrainingConfig,
)
from mcore.observe.runs.forward_step import (
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from mcore.observe.runs.run_log import RunLog
from mcore.observe.runs.state import GlobalState, TrainState
from mcore.observe.settings.secrets import config_params, mask_secrets
from mcore.observe.sinks import (
    CometSink,
    JsonlSink,
    MemorySink,
    MetricSink,
    MlflowSink,
    TensorBoardSink,
    WandbSink,
)
from mcore.observe.straggler.detector import (
    StragglerDetector,
    StragglerFoundError,
    __straggler__,
)
from mcore.observe.straggler.outliers import Outlier
from mcore.observe.straggler.ranges import SectionStats
from mcore.observe.straggler.report import StragglerReport, _StragglerData, _ValueWithRank
from mcore.observe.timers import Timer, Timers
from mcore.observe.training_log import training_log
from mcore.tensor.param_flags import param_is_not_shared

__all__ = [
    "MEMORY_KEYS",
    "MEMORY_KEYS_TABLE",
    "CometSink",
    "ConfigContainer",
    "DatasetConfig",
    "EnergyMonitor",
    "GlobalState",
    "JsonlSink",
    "LoggerConfig",
    "MTPMetricsTracker",
    "MemorySink",
    "MetricSink",
    "MlflowSink",
    "MoEMetricsTracker",
    "Outlier",
    "ProfilingConfig",
    "RunLog",
    "SectionStats",
    "StragglerDetector",
    "StragglerFoundError",
    "StragglerReport",
    "TensorBoardSink",
    "Timer",
    "Timers",
    "TrainState",
    "TrainingConfig",
    "WandbSink",
    "_MoeMetricFanoutWriter",
    "_StragglerData",
    "_ValueWithRank",
    "__straggler__",
    "__version__",
    "_build_moe_metric_writer",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "config_params",
    "configure_nvtx_profiling",
    "get_asyncio_loop",
    "get_moe_metrics_tracker",
    "get_mtp_metrics_tracker",
    "log_on_each_pipeline_stage",
    "log_single_rank",
    "mask_secrets",
    "maybe_inject_state",
    "needs_global_state_injection",
    "nvtx_decorator",
    "nvtx_range",
    "nvtx_range_pop",
    "nvtx_range_push",
    "param_is_not_shared",
    "prepare_forward_step_func",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "safe_get_rank",
    "safe_get_world_size",
    "start_memory_history_recording",
    "status_of",
    "trace_async_exceptions",
    "training_log",
]
