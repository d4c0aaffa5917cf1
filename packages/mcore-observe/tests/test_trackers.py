from types import SimpleNamespace
from unittest import mock

from mcore.observe.sinks import MemorySink
from mcore.observe.sinks.scalars import Scalar
from mcore.observe.trackers import SinkTable, emit


def test_the_guard_of_a_client_is_remembered():
    table, client = SinkTable(), mock.Mock()
    first = table.of(SimpleNamespace(wandb_logger=client))
    again = table.of(SimpleNamespace(wandb_logger=client))
    assert first[0][1] is again[0][1]
    other = table.of(SimpleNamespace(wandb_logger=mock.Mock()))
    assert other[0][1] is not first[0][1]


def test_extra_sinks_that_are_no_sequence_are_none():
    assert SinkTable().of(SimpleNamespace(extra_sinks=mock.Mock())) == []
    assert SinkTable().of(SimpleNamespace(extra_sinks=None)) == []


def test_each_kind_gets_its_names():
    state = SimpleNamespace(
        tensorboard_logger=mock.Mock(),
        mlflow_logger=mock.Mock(),
        comet_logger=mock.Mock(),
        extra_sinks=[MemorySink()],
    )
    batch = {
        "samples vs steps": Scalar(640),
        "lm loss": Scalar(2.5, versus_samples=True),
        "throughput/tflops/device": Scalar(2.0),
    }
    emit(SinkTable().of(state), [batch], 5, 640)
    assert state.tensorboard_logger.add_scalar.mock_calls == [
        mock.call("lm loss", 2.5, 5),
        mock.call("throughput/tflops/device", 2.0, 5),
        mock.call("lm loss vs samples", 2.5, 640),
    ]
    plain = {name: scalar.value for name, scalar in batch.items()}
    assert state.comet_logger.log_metrics.mock_calls == [mock.call(plain, step=5)]
    assert state.extra_sinks[0].steps == {5: plain}
    (sent,) = state.mlflow_logger.log_metrics.call_args.args
    assert set(sent) == {"samples vs steps", "lm loss", "throughput/tflops_per_device"}


def test_two_batches_are_two_calls():
    state = SimpleNamespace(wandb_logger=mock.Mock())
    emit(SinkTable().of(state), [{"a": Scalar(1.0)}, {"a": Scalar(2.0)}], 5, 640)
    assert state.wandb_logger.log.mock_calls == [
        mock.call({"a": 1.0}, 5),
        mock.call({"a": 2.0}, 5),
    ]
