from types import SimpleNamespace
from unittest import mock

from mcore.observe import GlobalState, MemorySink, TrainState
from mcore.observe.sinks.trackers import SinkTable, emit


def test_the_guard_of_a_client_is_remembered():
    state = GlobalState()
    state.wandb_logger = mock.Mock()
    (first,) = state.sinks()
    assert state.sinks() == [first]
    state.wandb_logger = mock.Mock()
    (other,) = state.sinks()
    assert other is not first


def test_extra_sinks_that_are_no_sequence_are_none():
    assert SinkTable().of(SimpleNamespace(extra_sinks=mock.Mock())) == []
    assert SinkTable().of(SimpleNamespace(extra_sinks=None)) == []


def test_each_tracker_gets_the_scalars_and_names_that_it_wants():
    kept = MemorySink()
    state = GlobalState(
        train_state=TrainState(step=5, consumed_train_samples=640), extra_sinks=[kept]
    )
    state.tensorboard_logger = mock.Mock()
    state.mlflow_logger = mock.Mock()
    state.comet_logger = mock.Mock()
    loss, others = {"lm loss": 2.5}, {"samples vs steps": 640, "throughput/tflops/device": 2.0}
    state.log_metrics(loss)
    state.log_metrics(others, versus_samples=False)
    assert state.tensorboard_logger.add_scalar.mock_calls == [
        mock.call("lm loss", 2.5, 5),
        mock.call("lm loss vs samples", 2.5, 640),
        mock.call("throughput/tflops/device", 2.0, 5),
    ]
    assert state.comet_logger.log_metrics.mock_calls == [
        mock.call(loss, step=5),
        mock.call(others, step=5),
    ]
    assert kept.steps == {5: loss | others}
    assert state.mlflow_logger.log_metrics.mock_calls == [
        mock.call(loss, step=5),
        mock.call({"samples vs steps": 640, "throughput/tflops_per_device": 2.0}, step=5),
    ]


def test_two_batches_are_two_calls():
    state = SimpleNamespace(wandb_logger=mock.Mock())
    batches = [{"a": SimpleNamespace(value=v, versus_samples=False)} for v in (1.0, 2.0)]
    emit(SinkTable().of(state), batches, 5, 640)
    assert state.wandb_logger.log.mock_calls == [
        mock.call({"a": 1.0}, 5),
        mock.call({"a": 2.0}, 5),
    ]
