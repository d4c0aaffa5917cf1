from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore.observe import MoEMetricsTracker, get_moe_metrics_tracker
from rank_testing import run_ranks


def recorded(values, name="z_loss", num_layers=None):
    tracker = MoEMetricsTracker()
    for layer, value in enumerate(values, start=1):
        tracker.record(name, torch.tensor(value), layer, num_layers or len(values))
    return tracker


def test_value_is_the_scaled_sum_over_moe_layers():
    tracker, writer, wandb, totals = recorded([1.0, 2.0, 3.0]), mock.Mock(), mock.Mock(), {}
    for layer in (1, 2):
        tracker.record("z_loss", torch.tensor([0.5]), layer, 3)
    text = tracker.report(
        0.5, 7, writer, wandb, total_loss_dict=totals, per_layer_logging=True, num_moe_layers=2
    )
    assert text == ""
    expected = {
        "z_loss": 7.0 * 0.5 / 2,
        "moe/z_loss_layer_0": 0.75,
        "moe/z_loss_layer_1": 1.25,
        "moe/z_loss_layer_2": 1.5,
    }
    assert {c.args[0]: c.args[1] for c in writer.add_scalar.mock_calls} == expected
    assert {c.args[2] for c in writer.add_scalar.mock_calls} == {7}
    assert wandb.log.mock_calls == [mock.call(expected, 7)]
    assert totals["z_loss"].tolist() == [1.75]


def test_a_report_starts_again_from_zero():
    tracker, totals = recorded([1.0, 3.0]), {}
    tracker.report(1.0, 1, total_loss_dict=totals)
    tracker.report(1.0, 2, total_loss_dict=totals)
    assert totals["z_loss"].tolist() == [2.0]
    tracker.record("z_loss", torch.tensor(10.0), 1, 2)
    tracker.report(1.0, 3, total_loss_dict=totals)
    assert totals["z_loss"].tolist() == [7.0]


def test_what_is_not_a_loss_comes_back_as_text():
    totals = {}
    tracker = recorded([1.0, 1.5], name="load_ratio")
    assert tracker.report(1.0, 1, total_loss_dict=totals) == " load_ratio: 1.25 |"
    assert totals == {}


def test_percentiles_are_over_layers_that_are_not_zero():
    for wanted in ([0.5, 1.0], {"z_loss": [0.5, 1.0], "other": [0.1]}):
        writer = mock.Mock()
        recorded([0.0, 1.0, 2.0, 6.0]).report(1.0, 1, writer, percentiles=wanted)
        written = {call.args[0]: call.args[1] for call in writer.add_scalar.mock_calls}
        assert written == {"z_loss": 9.0 / 4, "z_loss_p50": 2.0, "z_loss_p100": 6.0}
    writer = mock.Mock()
    recorded([0.0, 0.0]).report(1.0, 1, writer, percentiles=[0.5])
    assert [call.args[0] for call in writer.add_scalar.mock_calls] == ["z_loss"]


def test_chosen_names_only():
    tracker, totals = recorded([1.0]), {}
    tracker.record("other_loss", torch.tensor(1.0), 1, 1)
    tracker.report(1.0, 1, track_names="other_loss", total_loss_dict=totals)
    assert list(totals) == ["other_loss"]


def test_forced_names_are_zeros_of_all_layers():
    tracker, writer = MoEMetricsTracker(), mock.Mock()
    with pytest.raises(ValueError, match="force_initialize needs num_layers"):
        tracker.report(1.0, 1, force_initialize=True, track_names=["a_loss"])
    tracker.report(
        1.0,
        1,
        writer,
        force_initialize=True,
        track_names=["a_loss"],
        num_layers=2,
        mtp_num_layers=1,
        per_layer_logging=True,
    )
    written = {call.args[0]: call.args[1] for call in writer.add_scalar.mock_calls}
    assert written == {"a_loss": 0.0} | {f"moe/a_loss_layer_{i}": 0.0 for i in range(3)}


def test_wrong_layers_are_refused_and_no_layer_is_ignored():
    tracker = MoEMetricsTracker()
    tracker.record("z_loss", torch.tensor(1.0), None, 2)
    tracker.record("z_loss", torch.tensor(1.0), 1, 2)
    for layer in (0, 3):
        with pytest.raises(ValueError, match=f"layer_number is {layer}: give 1 to 2"):
            tracker.record("z_loss", torch.tensor(1.0), layer, 2)
    with pytest.raises(ValueError, match="has 2 layers, but num_layers is 3"):
        tracker.record("z_loss", torch.tensor(1.0), 1, 3)


@pytest.mark.parametrize(
    ("num_layers", "moe_layer_freq", "mtp_num_layers", "count"),
    [
        (4, None, None, 4),
        (4, 1, None, 4),
        (5, 2, None, 3),
        (4, [0, 1, 1, 0], None, 2),
        (4, [0, 1, 0, 1], 1, 3),
        (4, 2, 3, 5),
        (0, None, 1, 1),
    ],
)
@pytest.mark.parametrize("counts_itself", [False, True])
def test_layers_with_experts(num_layers, moe_layer_freq, mtp_num_layers, count, counts_itself):
    totals = {}
    recorded([60.0], num_layers=num_layers + (mtp_num_layers or 0)).report(
        1.0,
        1,
        num_layers=None if counts_itself else num_layers,
        moe_layer_freq=moe_layer_freq,
        mtp_num_layers=mtp_num_layers,
        total_loss_dict=totals,
    )
    assert totals["z_loss"].tolist() == [60.0 / count]


@pytest.mark.parametrize(
    "layers",
    [
        {"num_layers": 0},
        {"num_layers": 4, "moe_layer_freq": [0, 0, 0, 0]},
        {"num_moe_layers": 0},
    ],
)
def test_a_model_without_experts_has_no_metrics(layers):
    with pytest.raises(ValueError, match="has 0 MoE layers"):
        recorded([1.0]).report(1.0, 1, **layers)


def test_steps_are_kept_or_dropped_as_a_whole():
    tracker, totals, writer = MoEMetricsTracker(), {}, mock.Mock()
    for value, is_kept in ((1.0, True), (100.0, False), (3.0, True)):
        tracker.record("z_loss", torch.tensor(value), 1, 1)
        if is_kept:
            tracker.commit_step()
        else:
            tracker.discard_step()
    tracker.report(1.0, 3, writer, total_loss_dict=totals, num_steps=2)
    assert totals["z_loss"].tolist() == [4.0]
    assert writer.add_scalar.mock_calls == [mock.call("z_loss", 2.0, 3)]


def test_after_a_reset_a_model_of_another_depth_records():
    tracker = recorded([100.0])
    tracker.commit_step()
    tracker.reset()
    tracker.record("z_loss", torch.tensor(4.0), 2, 2)
    assert tracker.take(1.0).layers["z_loss"].tolist() == [0.0, 4.0]


def test_a_recorded_value_keeps_no_graph():
    tracker = MoEMetricsTracker()
    tracker.record("z_loss", torch.tensor(1.0, requires_grad=True) * 2, 1, 1)
    assert not tracker.take(1.0).values["z_loss"].requires_grad


def test_the_tracker_of_the_process():
    assert get_moe_metrics_tracker() is get_moe_metrics_tracker()


def reduced_over_two_by_two():
    """Ranks 0 and 1 are the first pipeline stage, 2 and 3 the second."""
    rank = dist.get_rank()
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage, pp = stages[rank // 2], pipelines[rank % 2]
    tracker = MoEMetricsTracker()
    value = torch.tensor(float(10**rank))
    names = ["plain_loss", "summed_loss", "mean_loss"]
    if rank < 2:  # only the first stage has experts
        for name, groups in zip(
            names, ({}, {"reduce_group": stage}, {"avg_group": stage}), strict=True
        ):
            tracker.record(name, value, 1, 2, needs_dp_avg=False, **groups)
        tracker.record("dp_loss", value, 1, 2)
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(1), all_reduce(*a, **k))[1]
    totals = {}
    tracker.report(
        1.0,
        1,
        force_initialize=True,
        track_names=[*names, "dp_loss"],
        num_layers=2,
        num_moe_layers=1,
        total_loss_dict=totals,
        pg_collection=SimpleNamespace(dp=stage, pp=pp),
    )
    return {name: total.item() for name, total in totals.items()}, len(calls)


def test_reduction_over_stages_and_ranks_with_one_call_a_group():
    results = run_ranks(reduced_over_two_by_two, 4)
    common = {"summed_loss": 11.0, "mean_loss": 5.5, "dp_loss": 5.5}
    assert [totals for totals, _ in results] == [
        {"plain_loss": 1.0} | common,
        {"plain_loss": 10.0} | common,
        {"plain_loss": 1.0} | common,
        {"plain_loss": 10.0} | common,
    ]
    # sum, mean and data-parallel mean in the stage, then one over the pipeline; the stage without
    # experts has its data-parallel mean and the pipeline
    assert [count for _, count in results] == [4, 4, 2, 2]
