"""Places that take metrics: one protocol, one module for each tracker or file format."""

from mcore.observe.sinks.comet import CometSink
from mcore.observe.sinks.guarded import GuardedSink
from mcore.observe.sinks.jsonl import JsonlSink
from mcore.observe.sinks.memory import MemorySink
from mcore.observe.sinks.mlflow import MlflowSink, sanitize_metric_name
from mcore.observe.sinks.protocol import MetricSink
from mcore.observe.sinks.tensorboard import TensorBoardSink
from mcore.observe.sinks.wandb import WandbSink

__all__ = [
    "CometSink",
    "GuardedSink",
    "JsonlSink",
    "MemorySink",
    "MetricSink",
    "MlflowSink",
    "TensorBoardSink",
    "WandbSink",
    "sanitize_metric_name",
]
