"""Sinks accept metrics: one protocol, one module for each tracker or file format."""

from mcore.observe.sinks.base import GuardedSink, MemorySink, MetricSink
from mcore.observe.sinks.comet import CometSink
from mcore.observe.sinks.jsonl import JsonlSink, records_of
from mcore.observe.sinks.mlflow import (
    MlflowConnection,
    MlflowRun,
    MlflowSink,
    TrackingServer,
    mlflow_metric_name,
    open_mlflow,
    sanitize_metric_name,
)
from mcore.observe.sinks.tensorboard import TensorBoardSink
from mcore.observe.sinks.wandb import WandbSink

__all__ = [
    "CometSink",
    "GuardedSink",
    "JsonlSink",
    "MemorySink",
    "MetricSink",
    "MlflowConnection",
    "MlflowRun",
    "MlflowSink",
    "TensorBoardSink",
    "TrackingServer",
    "WandbSink",
    "mlflow_metric_name",
    "open_mlflow",
    "records_of",
    "sanitize_metric_name",
]
