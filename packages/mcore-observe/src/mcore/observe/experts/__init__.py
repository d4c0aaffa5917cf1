"""Metrics of experts and of multi-token prediction, and a writer to all trackers."""

from mcore.observe.experts.moe_metrics import (
    MoEMetricsTracker,
    _build_moe_metric_writer,
    _MoeMetricFanoutWriter,
    get_moe_metrics_tracker,
)
from mcore.observe.experts.mtp_metrics import MTPMetricsTracker, get_mtp_metrics_tracker

__all__ = [
    "MTPMetricsTracker",
    "MoEMetricsTracker",
    "_MoeMetricFanoutWriter",
    "_build_moe_metric_writer",
    "get_moe_metrics_tracker",
    "get_mtp_metrics_tracker",
]
