from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore.observe import _build_moe_metric_writer, _MoeMetricFanoutWriter
from rank_testing import run_ranks


@pytest.mark.parametrize("value", [1.234, torch.tensor(1.234, dtype=torch.float64)])
def test_one_scalar_reaches_all(value):
    tb, comet, mlflow = mock.Mock(), mock.Mock(), mock.Mock()
    _MoeMetricFanoutWriter(tb, comet, mlflow).add_scalar("load_balancing_loss", value, 42)
    assert tb.add_scalar.mock_calls == [mock.call("load_balancing_loss", value, 42)]
    for client in (comet, mlflow):
        assert client.log_metrics.mock_calls == [mock.call({"load_balancing_loss": 1.234}, step=42)]
        assert type(client.log_metrics.call_args.args[0]["load_balancing_loss"]) is float


def test_mlflow_gets_sanitized_names():
    comet, mlflow = mock.Mock(), mock.Mock()
    _MoeMetricFanoutWriter(None, comet, mlflow).add_scalar("moe/a/b@1", 1.0, 1)
    assert mlflow.log_metrics.mock_calls == [mock.call({"moe/a_b_at_1": 1.0}, step=1)]
    assert comet.log_metrics.mock_calls == [mock.call({"moe/a/b@1": 1.0}, step=1)]


def test_without_comet_or_mlflow_the_others_still_get_it():
    mlflow, comet = mock.Mock(), mock.Mock()
    _MoeMetricFanoutWriter(None, None, mlflow).add_scalar("a", 1.0, 1)
    _MoeMetricFanoutWriter(None, comet, None).add_scalar("a", 1.0, 1)
    assert mlflow.log_metrics.call_count == comet.log_metrics.call_count == 1


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        (torch.tensor([[2.5]]), 2.5),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor(3), 3),
        (4, 4),
        ("text", "text"),
        (None, None),
    ],
)
def test_sanitize(value, clean):
    assert _MoeMetricFanoutWriter._sanitize(value) == clean


def test_sanitize_leaves_several_elements_alone_and_reads_numpy():
    tensor = torch.ones(2)
    assert _MoeMetricFanoutWriter._sanitize(tensor) is tensor
    numpy = pytest.importorskip("numpy")
    assert type(_MoeMetricFanoutWriter._sanitize(numpy.float32(0.5))) is float


def test_several_elements_go_to_tensorboard_only_with_one_warning(caplog):
    tb, comet = mock.Mock(), mock.Mock()
    writer = _MoeMetricFanoutWriter(tb, comet, None)
    for step in (1, 2):
        writer.add_scalar("a", torch.ones(2), step)
    assert tb.add_scalar.call_count == 2
    assert comet.log_metrics.mock_calls == []
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_other_methods_are_those_of_tensorboard():
    tb = mock.Mock()
    writer = _MoeMetricFanoutWriter(tb, mock.Mock(), None)
    writer.add_scalars("group", {"a": 1.0}, 3)
    writer.flush()
    writer.add_text("a", "b")
    assert tb.mock_calls == [
        mock.call.add_scalars("group", {"a": 1.0}, 3),
        mock.call.flush(),
        mock.call.add_text("a", "b"),
    ]
    alone = _MoeMetricFanoutWriter(None, mock.Mock(), None)
    alone.add_scalars("group", {"a": 1.0}, 3)
    alone.flush()
    with pytest.raises(AttributeError):
        alone.add_text("a", "b")


def test_the_writer_itself_where_nobody_else_listens():
    tb = mock.Mock()
    assert _build_moe_metric_writer(tb, None, None) is tb
    assert _build_moe_metric_writer(None, None, None) is None
    for clients in ((mock.Mock(), None), (None, mock.Mock())):
        assert isinstance(_build_moe_metric_writer(None, *clients), _MoeMetricFanoutWriter)


def sanitized_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.tensor(float(dist.get_rank() + 1)), mesh, [Partial()])
    return _MoeMetricFanoutWriter._sanitize(value)


def test_a_dtensor_is_made_whole():
    assert run_ranks(sanitized_dtensor, 2) == [3.0, 3.0]
