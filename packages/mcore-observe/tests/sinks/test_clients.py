"""Sinks make only calls that the clients document."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import CometSink, MetricSink, MlflowSink, TensorBoardSink, WandbSink
from mcore.observe.sinks import mlflow_metric_name, sanitize_metric_name

METRICS = {"lm loss": 2.5, "throughput/tflops/device": 2.0}


class Client:
    def __init__(self, *methods):
        self.calls = mock.Mock()
        for name in methods:
            setattr(self, name, getattr(self.calls, name))


@pytest.mark.parametrize(
    ("sink", "methods", "expected"),
    [
        (
            TensorBoardSink,
            ("add_scalar", "flush", "close"),
            [
                mock.call.add_scalar("lm loss", 2.5, 7),
                mock.call.add_scalar("throughput/tflops/device", 2.0, 7),
                mock.call.flush(),
                mock.call.close(),
            ],
        ),
        (WandbSink, ("log", "finish"), [mock.call.log(METRICS, 7), mock.call.finish()]),
        (
            CometSink,
            ("log_metrics", "flush", "end"),
            [mock.call.log_metrics(METRICS, step=7), mock.call.flush(), mock.call.end()],
        ),
        (
            MlflowSink,
            ("log_metrics", "flush_async_logging", "end_run"),
            [
                mock.call.log_metrics({"lm loss": 2.5, "throughput/tflops_device": 2.0}, step=7),
                mock.call.flush_async_logging(),
                mock.call.end_run(),
            ],
        ),
        (
            MlflowSink,
            ("log_metrics", "flush", "close"),
            [
                mock.call.log_metrics({"lm loss": 2.5, "throughput/tflops_device": 2.0}, step=7),
                mock.call.flush(),
                mock.call.close(),
            ],
        ),
    ],
)
def test_documented_calls(sink, methods, expected):
    client = Client(*methods)
    adapter = sink(client)
    assert isinstance(adapter, MetricSink)
    adapter.log(METRICS, 7)
    adapter.flush()
    adapter.close()
    assert client.calls.mock_calls == expected


def test_mlflow_names_that_become_the_same_are_sent_in_two_calls():
    client = Client("log_metrics")
    MlflowSink(client).log({"a@b": 1.0, "a_at_b": 2.0, "c": 3.0}, 1)
    assert client.calls.mock_calls == [
        mock.call.log_metrics({"a_at_b": 1.0}, step=1),
        mock.call.log_metrics({"a_at_b": 2.0, "c": 3.0}, step=1),
    ]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("lm loss", "lm loss"),
        ("acc@5", "acc_at_5"),
        ("throughput//tflops///device", "throughput/tflops_device"),
        ("time/remaining_estimate", "time/remaining_estimate"),
        ("a:b-c.d_e 1", "a:b-c.d_e 1"),
        ("perplexity (%)", "perplexity ___"),
        ("loss_\u00fc", "loss_\u00fc"),
        ("", "_"),
        ("/loss", "_loss"),
        ("loss/", "loss"),
        ("..", "__"),
        ("../loss", "__/loss"),
        ("a/./b", "a/._b"),
        ("x" * 300, "x" * 250),
        ("y" * 249 + "/tail", "y" * 249),
    ],
)
def test_sanitized_names(name, clean):
    assert sanitize_metric_name(name) == clean
    assert sanitize_metric_name(clean) == clean


def test_the_throughput_of_a_device_has_the_name_that_dashboards_know():
    assert mlflow_metric_name("throughput/tflops/device") == "throughput/tflops_per_device"
    assert mlflow_metric_name("acc@5") == "acc_at_5"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text("./a@ ", max_size=8)))
def test_sanitized_names_are_those_that_mlflow_takes(name):
    validation = pytest.importorskip("mlflow.utils.validation")
    clean = sanitize_metric_name(name)
    validation._validate_metric_name(clean)
    assert 1 <= len(clean) <= validation.MAX_ENTITY_KEY_LENGTH
    assert sanitize_metric_name(clean) == clean
