"""Metrics of experts and of multi-token prediction in the training log."""

import math
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from mcore.observe import (
    MemorySink,
    MoEMetricsTracker,
    MTPMetricsTracker,
    get_moe_metrics_tracker,
    get_mtp_metrics_tracker,
)
from mcore.observe.training_log import expert_report


@pytest.fixture(autouse=True)
def no_tracker_of_the_process():
    get_moe_metrics_tracker.cache_clear()
    get_mtp_metrics_tracker.cache_clear()
    yield
    get_moe_metrics_tracker.cache_clear()
    get_mtp_metrics_tracker.cache_clear()


def moe_model(**options):
    return SimpleNamespace(
        **{
            "num_moe_experts": 4,
            "num_layers": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_z_loss_coeff": 0.1,
            "mtp_num_layers": None,
        }
        | options
    )


def record_router(tracker, value):
    for layer in (1, 2):
        tracker.record("load_balancing_loss", torch.tensor(value), layer, 2)


def test_router_losses_reach_sinks_and_line(make_state, log_step, printed_line):
    sink = MemorySink()
    totals = {}
    state = make_state(step=4, sinks=[sink], tensorboard_log_interval=1, model=moe_model())
    state.moe_metrics = MoEMetricsTracker()
    for step, value in ((4, 8.0), (5, 16.0)):
        state.train_state.step = step
        record_router(state.moe_metrics, value)
        log_step(state, totals=totals)
    # Both layers have the same value, eight microbatches divide it.
    assert [sink.steps[step]["load_balancing_loss"] for step in (4, 5)] == [1.0, 2.0]
    assert [sink.steps[step]["z_loss"] for step in (4, 5)] == [0.0, 0.0]
    averages = " load_balancing_loss: 1.500000E+00 | z_loss: 0.000000E+00 | loss scale"
    assert averages in printed_line()


def test_router_losses_of_an_interval_leave_skipped_steps_out(make_state, log_step, printed_line):
    sink = MemorySink()
    model = moe_model(moe_per_layer_logging=True)
    state, totals = make_state(step=0, sinks=[sink], model=model), {}
    state.moe_metrics = MoEMetricsTracker()
    for step, (value, skipped) in enumerate(
        [(8.0, 0), (80.0, 1), (16.0, 0), (math.nan, 1), (24.0, 0)], start=1
    ):
        state.train_state.step = step
        record_router(state.moe_metrics, value)
        log_step(state, totals=totals, skipped=skipped)
    assert sink.steps[5]["load_balancing_loss"] == pytest.approx((1 + 2 + 3) / 3)
    assert sink.steps[5]["moe/load_balancing_loss_layer_1"] == pytest.approx(2.0)
    assert " load_balancing_loss: 2.000000E+00 |" in printed_line()


def test_metrics_that_are_not_losses_end_the_line(make_state, log_step, printed_line):
    state = make_state(model=moe_model())
    state.moe_metrics = MoEMetricsTracker()
    with mock.patch.object(expert_report, "moe_metric_names", return_value=["load_ratio"]):
        state.moe_metrics.record("load_ratio", torch.tensor(20.0), 1, 2)
        log_step(state)
    assert printed_line().endswith(" number of nan iterations:   0 | load_ratio: 1.25 |")


def test_a_foreign_tracker_is_asked_at_every_step(make_state, log_step):
    asked = []

    class Foreign:
        def report(self, *, writer, total_loss_dict, iteration, loss_scale, **options):
            writer.add_scalar("z_loss", 0.5, iteration)
            asked.append((iteration, loss_scale, total_loss_dict == {}))
            return " routed: 1.00 |"

    sink = MemorySink()
    state = make_state(step=4, sinks=[sink], model=moe_model())
    state.moe_metrics = Foreign()
    log_step(state, skipped=1)
    state.train_state.step = 5
    log_step(state)
    assert asked == [(4, 1 / 8, True), (5, 1 / 8, False)]
    assert sink.steps[5]["z_loss"] == 0.5


def test_multi_token_prediction_reaches_sinks_and_line(make_state, log_step, printed_line):
    sink = MemorySink()
    model = SimpleNamespace(num_moe_experts=None, mtp_num_layers=1)
    state = make_state(sinks=[sink], model=model)
    state.mtp_metrics = MTPMetricsTracker()
    state.mtp_metrics.record(torch.tensor(8.0), 1, 1, accepted=3, predicted=4)
    log_step(state)
    assert sink.steps[5]["mtp_1 loss"] == 1.0
    assert sink.steps[5]["mtp_1_acceptance_rate"] == 75.0
    assert " lm loss: 2.500000E+00 | mtp_1 loss: 1.000000E+00 |" in printed_line()


@pytest.mark.parametrize(
    ("kind", "z_loss", "names"),
    [
        ("aux_loss", None, ["load_balancing_loss"]),
        ("seq_aux_loss", None, ["load_balancing_loss", "seq_load_balancing_loss"]),
        ("global_aux_loss", 0.1, ["load_balancing_loss", "global_load_balancing_loss", "z_loss"]),
        (["seq_aux_loss"], None, ["seq_load_balancing_loss"]),
        (
            ["aux_loss", "global_aux_loss"],
            None,
            ["load_balancing_loss", "global_load_balancing_loss"],
        ),
        ("none", None, []),
        ("none", 0.0, ["z_loss"]),
        ("sinkhorn", None, []),
    ],
)
def test_names_of_router_losses(kind, z_loss, names, make_state, log_step):
    asked = {}
    model = moe_model(moe_router_load_balancing_type=kind, moe_z_loss_coeff=z_loss)
    state = make_state(model=model)
    state.moe_metrics = SimpleNamespace(report=lambda **options: asked.update(options))
    log_step(state)
    assert asked["track_names"] == names


@pytest.fixture
def sent_and_summed(make_state, log_step):
    """Logs a step without losses: what the sinks get of experts, and their sums."""

    def log(model, *, skipped=0, microbatches=1, **trackers):
        sink, totals = MemorySink(), {}
        state = make_state(sinks=[sink], log_interval=100, model=model)
        state.get_num_microbatches = lambda: microbatches
        for name, tracker in trackers.items():
            setattr(state, name, tracker)
        log_step(state, {}, totals, skipped=skipped)
        common = {"samples vs steps", "learning-rate", "batch-size", "loss-scale"}
        sent = {name: value for name, value in sink.steps[5].items() if name not in common}
        return sent, {n: v.item() for n, v in totals.items() if isinstance(v, torch.Tensor)}

    return log


def plain_moe(**options):
    return moe_model(**{"num_layers": 4, "moe_z_loss_coeff": None} | options)


def test_a_dense_model_reports_nothing_and_makes_no_tracker(sent_and_summed):
    assert sent_and_summed(None) == ({}, {})
    assert sent_and_summed(SimpleNamespace(num_moe_experts=None)) == ({}, {})
    assert get_moe_metrics_tracker.cache_info().currsize == 0


def test_the_tracker_of_the_process_serves_where_none_is_given(sent_and_summed):
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    values, totals = sent_and_summed(plain_moe(), microbatches=2)
    assert values == totals == {"load_balancing_loss": 1.0}


def test_a_given_tracker_comes_first(sent_and_summed):
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(100.0), 1, 4)
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    values, _ = sent_and_summed(plain_moe(moe_layer_freq=2), moe_metrics=tracker)
    assert values == {"load_balancing_loss": 4.0}


def test_layers_of_a_hybrid_model_are_those_with_experts(sent_and_summed):
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 5)
    model = plain_moe(is_hybrid_model=True, hybrid_layer_pattern="ME*E", mtp_num_layers=1)
    values, _ = sent_and_summed(model, moe_metrics=tracker, mtp_metrics=MTPMetricsTracker())
    assert values == {"load_balancing_loss": pytest.approx(8.0 / 3)}


def test_a_skipped_step_is_left_out(sent_and_summed):
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    assert sent_and_summed(plain_moe(), skipped=1, moe_metrics=tracker) == ({}, {})


@pytest.fixture
def megatron(monkeypatch):
    """Puts Megatron-LM's functions in place; returns what the one for routers was asked last."""
    asked = {}

    def track_moe_metrics(
        loss_scale, iteration, writer, wandb_writer=None, total_loss_dict=None,
        per_layer_logging=False, force_initialize=False, track_names=None, num_layers=None,
        moe_layer_freq=None, mtp_num_layers=None, pg_collection=None,
    ):  # fmt: skip
        asked.update(locals())
        writer.add_scalar("z_loss", 0.5, iteration)
        return " from afar: 1.00 |"

    class MTPLossLoggingHelper:
        @staticmethod
        def track_mtp_metrics(
            loss_scale, iteration, writer, wandb_writer=None, total_loss_dict=None
        ):
            total_loss_dict["mtp_1 loss"] = torch.tensor([loss_scale])

    moe = ModuleType("megatron.core.transformer.moe.moe_utils")
    moe.track_moe_metrics = track_moe_metrics
    mtp = ModuleType("megatron.core.transformer.multi_token_prediction")
    mtp.MTPLossLoggingHelper = MTPLossLoggingHelper
    for module in (moe, mtp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


HYBRID = {
    "is_hybrid_model": True,
    "hybrid_layer_pattern": "ME*E",
    "moe_layer_freq": 2,
    "mtp_num_layers": 1,
}


def test_functions_of_megatron_serve_where_they_are_loaded(megatron, sent_and_summed):
    values, totals = sent_and_summed(plain_moe(**HYBRID), microbatches=2)
    assert values == {"z_loss": 0.5}
    assert totals == {"mtp_1 loss": 0.5}
    layers = ("num_layers", "moe_layer_freq", "mtp_num_layers")
    assert [megatron[name] for name in layers] == [2, None, 1]
    assert megatron["force_initialize"] is True
    assert megatron["track_names"] == ["load_balancing_loss"]
    assert megatron["loss_scale"] == 0.5
    assert megatron["wandb_writer"] is None


def test_functions_of_megatron_are_asked_at_a_step_that_logs_nothing(
    megatron, make_state, log_step, capsys
):
    state, totals = make_state(step=4, model=plain_moe(**HYBRID)), {}
    log_step(state, {}, totals)
    assert megatron["iteration"] == 4
    assert totals["mtp_1 loss"].item() == 1 / 8
    assert capsys.readouterr().out == ""


def test_text_of_megatron_ends_the_line(megatron, make_state, log_step, printed_line):
    log_step(make_state(model=plain_moe(**HYBRID)), {})
    line = printed_line()
    assert " mtp_1 loss: 1.250000E-01 |" in line
    assert line.endswith(" number of nan iterations:   0 | from afar: 1.00 |")


def test_who_uses_our_tracker_gets_our_tracker(megatron, sent_and_summed):
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(8.0), 1, 5)
    get_mtp_metrics_tracker().record(torch.tensor(1.0), 1, 1)
    values, _ = sent_and_summed(plain_moe(**HYBRID))
    assert set(values) == {"load_balancing_loss", "mtp_1 loss"}
    assert megatron == {}
