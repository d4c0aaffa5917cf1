"""Straggler detection, training logs, timers and metric sinks for distributed training."""

from mcore.observe._version import __version__
from mcore.observe.energy import EnergyMonitor
from mcore.observe.forward_step import (
    maybe_inject_state,
    needs_global_state_injection,
    prepare_forward_step_func,
)
from mcore.observe.logger_config import LoggerConfig
from mcore.observe.memory import MEMORY_KEYS, MEMORY_KEYS_TABLE, report_memory
from mcore.observe.memory_snapshot import start_memory_history_recording
from mcore.observe.moe_fanout import _build_moe_metric_writer, _MoeMetricFanoutWriter
from mcore.observe.moe_metrics import MoEMetricsTracker, get_moe_metrics_tracker
from mcore.observe.mtp_metrics import MTPMetricsTracker, get_mtp_metrics_tracker
from mcore.observe.norms import report_l2_norm_grad
from mcore.observe.parameter_norms import calc_dtensor_params_l2_norm, calc_params_l2_norm
from mcore.observe.progress import report_runtime, report_throughput
from mcore.observe.run_config import (
    ConfigContainer,
    DatasetConfig,
    ProfilingConfig,
    TrainingConfig,
)
from mcore.observe.sinks import (
    CometSink,
    JsonlSink,
    MemorySink,
    MetricSink,
    MlflowSink,
    TensorBoardSink,
    WandbSink,
)
from mcore.observe.state import GlobalState, TrainState
from mcore.observe.timer import Timer
from mcore.observe.timers import Timers
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
    "ProfilingConfig",
    "TensorBoardSink",
    "Timer",
    "Timers",
    "TrainState",
    "TrainingConfig",
    "WandbSink",
    "_MoeMetricFanoutWriter",
    "__version__",
    "_build_moe_metric_writer",
    "calc_dtensor_params_l2_norm",
    "calc_params_l2_norm",
    "get_moe_metrics_tracker",
    "get_mtp_metrics_tracker",
    "maybe_inject_state",
    "needs_global_state_injection",
    "param_is_not_shared",
    "prepare_forward_step_func",
    "report_l2_norm_grad",
    "report_memory",
    "report_runtime",
    "report_throughput",
    "start_memory_history_recording",
    "training_log",
]
