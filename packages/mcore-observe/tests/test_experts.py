import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mcore.observe.steplog.experts import ExpertReport, moe_metric_names

from mcore.observe import (
    MoEMetricsTracker,
    MTPMetricsTracker,
    get_moe_metrics_tracker,
    get_mtp_metrics_tracker,
)
from mcore.observe.sinks.scalars import Scalars


@pytest.fixture(autouse=True)
def no_tracker_of_the_process():
    get_moe_metrics_tracker.cache_clear()
    get_mtp_metrics_tracker.cache_clear()
    yield
    get_moe_metrics_tracker.cache_clear()
    get_mtp_metrics_tracker.cache_clear()


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
def test_names(kind, z_loss, names):
    model = SimpleNamespace(moe_router_load_balancing_type=kind, moe_z_loss_coeff=z_loss)
    assert moe_metric_names(model) == names


def moe_config(**options):
    return SimpleNamespace(
        **{
            "num_moe_experts": 4,
            "num_layers": 4,
            "moe_router_load_balancing_type": "aux_loss",
        }
        | options
    )


def collect(state, model, *, skipped=False, logs=True, microbatches=1):
    report, scalars, totals = ExpertReport(), Scalars(), {}
    report.end_step(state, model, skipped=skipped, num_microbatches=microbatches)
    texts = report.collect(
        state,
        model,
        scalars,
        totals,
        num_microbatches=microbatches,
        skipped=skipped,
        step_logs=logs,
        pg_collection=None,
    )
    values = {n: float(s.value) for batch in scalars.batches for n, s in batch.items()}
    return values, {name: total.item() for name, total in totals.items()}, texts


def make_state(**trackers):
    return SimpleNamespace(train_state=SimpleNamespace(step=3), **trackers)


def test_a_dense_model_reports_nothing_and_makes_no_tracker():
    assert collect(make_state(), None)[:2] == ({}, {})
    assert collect(make_state(), SimpleNamespace(num_moe_experts=None))[:2] == ({}, {})
    assert get_moe_metrics_tracker.cache_info().currsize == 0


def test_the_tracker_of_the_process_serves_where_none_is_given():
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    values, totals, _ = collect(make_state(), moe_config(), microbatches=2)
    assert values == totals == {"load_balancing_loss": 1.0}


def test_a_given_tracker_comes_first():
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(100.0), 1, 4)
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    values, _, _ = collect(make_state(moe_metrics=tracker), moe_config(moe_layer_freq=2))
    assert values == {"load_balancing_loss": 4.0}


def test_layers_of_a_hybrid_model_are_those_with_experts():
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 5)
    model = moe_config(is_hybrid_model=True, hybrid_layer_pattern="ME*E", mtp_num_layers=1)
    mtp = MTPMetricsTracker()
    values, _, _ = collect(make_state(moe_metrics=tracker, mtp_metrics=mtp), model)
    assert values == {"load_balancing_loss": pytest.approx(8.0 / 3)}


def test_a_skipped_step_is_left_out():
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(8.0), 1, 4)
    assert collect(make_state(moe_metrics=tracker), moe_config(), skipped=True)[:2] == ({}, {})


def test_functions_of_megatron_serve_where_they_are_loaded(monkeypatch):
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
    model = moe_config(
        is_hybrid_model=True, hybrid_layer_pattern="ME*E", moe_layer_freq=2, mtp_num_layers=1
    )
    values, totals, texts = collect(make_state(), model, logs=False, microbatches=2)
    assert values == {"z_loss": 0.5}
    assert totals == {"mtp_1 loss": 0.5}
    assert texts.ready == " from afar: 1.00 |"
    assert (asked["num_layers"], asked["moe_layer_freq"], asked["mtp_num_layers"]) == (2, None, 1)
    assert asked["force_initialize"] is True
    assert asked["track_names"] == ["load_balancing_loss"]
    assert asked["loss_scale"] == 0.5
    assert asked["wandb_writer"] is None
    # Somebody who uses our tracker gets our tracker.
    get_moe_metrics_tracker().record("load_balancing_loss", torch.tensor(8.0), 1, 5)
    get_mtp_metrics_tracker().record(torch.tensor(1.0), 1, 1)
    values, _, _ = collect(make_state(), model)
    assert set(values) == {"load_balancing_loss", "mtp_1 loss"}
