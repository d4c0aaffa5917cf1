"""Straggler detection, training logs, timers and metric sinks for distributed training."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from mcore.observe._version import __version__

if TYPE_CHECKING:
    from mcore.observe.async_tasks import get_asyncio_loop, trace_async_exceptions
    from mcore.observe.experts.moe_metrics import (
        MoEMetricsTracker,
        _build_moe_metric_writer,
        _MoeMetricFanoutWriter,
        get_moe_metrics_tracker,
    )
    from mcore.observe.experts.mtp_metrics import MTPMetricsTracker, get_mtp_metrics_tracker
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
    from mcore.observe.rank_logging import (
        log_on_each_pipeline_stage,
        log_single_rank,
        safe_get_rank,
        safe_get_world_size,
    )
    from mcore.observe.reports import (
        MEMORY_KEYS,
        MEMORY_KEYS_TABLE,
        EnergyMonitor,
        report_memory,
        report_runtime,
        report_throughput,
        start_memory_history_recording,
    )
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
    from mcore.observe.runs.state import GlobalState, RunLog, TrainState
    from mcore.observe.sinks import (
        CometSink,
        JsonlSink,
        MemorySink,
        MetricSink,
        MlflowSink,
        TensorBoardSink,
        WandbSink,
    )
    from mcore.observe.sinks.delivery.process_end import status_of
    from mcore.observe.sinks.secrets import config_params, mask_secrets
    from mcore.observe.straggler.detector import (
        StragglerDetector,
        StragglerFoundError,
        __straggler__,
    )
    from mcore.observe.straggler.outliers import Outlier
    from mcore.observe.straggler.ranges import SectionStats
    from mcore.observe.straggler.report import StragglerReport, _StragglerData, _ValueWithRank
    from mcore.observe.straggler.settings import StragglerSettings
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
    "StragglerSettings",
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

# The names above by module. A module is imported when one of its names is first used, so that
# neither "import mcore.observe" nor the command mcore-straggler loads torch, which takes seconds.
_NAMES = {
    "mcore.observe.async_tasks": "get_asyncio_loop trace_async_exceptions",
    "mcore.observe.experts.moe_metrics": (
        "MoEMetricsTracker _build_moe_metric_writer _MoeMetricFanoutWriter get_moe_metrics_tracker"
    ),
    "mcore.observe.experts.mtp_metrics": "MTPMetricsTracker get_mtp_metrics_tracker",
    "mcore.observe.norms": "calc_dtensor_params_l2_norm calc_params_l2_norm report_l2_norm_grad",
    "mcore.observe.nvtx": (
        "configure_nvtx_profiling nvtx_decorator nvtx_range nvtx_range_pop nvtx_range_push"
    ),
    "mcore.observe.rank_logging": (
        "log_on_each_pipeline_stage log_single_rank safe_get_rank safe_get_world_size"
    ),
    "mcore.observe.reports": (
        "EnergyMonitor MEMORY_KEYS MEMORY_KEYS_TABLE report_memory report_runtime "
        "report_throughput start_memory_history_recording"
    ),
    "mcore.observe.runs.config": (
        "ConfigContainer DatasetConfig LoggerConfig ProfilingConfig TrainingConfig"
    ),
    "mcore.observe.runs.forward_step": (
        "maybe_inject_state needs_global_state_injection prepare_forward_step_func"
    ),
    "mcore.observe.runs.state": "GlobalState RunLog TrainState",
    "mcore.observe.sinks": (
        "CometSink JsonlSink MemorySink MetricSink MlflowSink TensorBoardSink WandbSink"
    ),
    "mcore.observe.sinks.delivery.process_end": "status_of",
    "mcore.observe.sinks.secrets": "config_params mask_secrets",
    "mcore.observe.straggler.detector": "StragglerDetector StragglerFoundError __straggler__",
    "mcore.observe.straggler.outliers": "Outlier",
    "mcore.observe.straggler.ranges": "SectionStats",
    "mcore.observe.straggler.report": "StragglerReport _StragglerData _ValueWithRank",
    "mcore.observe.straggler.settings": "StragglerSettings",
    "mcore.observe.timers": "Timer Timers",
    "mcore.observe.training_log": "training_log",
    "mcore.tensor.param_flags": "param_is_not_shared",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

# Type checkers see the imports above, and not a function that would accept any name.
if not TYPE_CHECKING:

    class _Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            # The import system sets each submodule as an attribute of its package. The name
            # training_log stays free for the function.
            if name not in _MODULE_OF or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package

    def __getattr__(name: str) -> object:
        """Import the module of a name, or a submodule."""
        if name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            value = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
