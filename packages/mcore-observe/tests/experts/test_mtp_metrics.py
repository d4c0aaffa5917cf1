from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore.observe import MTPMetricsTracker, get_mtp_metrics_tracker
from rank_testing import run_ranks


def written(tracker, **options):
    writer = mock.Mock()
    assert tracker.report(0.5, 1, writer, **options) == ""
    return {call.args[0]: call.args[1] for call in writer.add_scalar.mock_calls}


def test_losses_and_rates_by_depth():
    tracker, totals = MTPMetricsTracker(), {}
    for _ in range(2):
        tracker.record(torch.tensor(2.0), 1, 2, accepted=3, predicted=4)
        tracker.record(torch.tensor([4.0]), 2, 2, accepted=torch.tensor(1), predicted=4)
    first = written(tracker, total_loss_dict=totals)
    assert first == {
        "mtp_1 loss": 2.0,
        "mtp_2 loss": 4.0,
        "mtp_1_acceptance_rate": 75.0,
        "mtp_2_acceptance_rate": 25.0,
        "mtp_1_cumulative_acceptance_rate": 75.0,
        "mtp_2_cumulative_acceptance_rate": 25.0,
    }
    assert {name: total.tolist() for name, total in totals.items()} == {
        "mtp_1 loss": [2.0],
        "mtp_2 loss": [4.0],
    }
    tracker.record(torch.tensor(0.0), 1, 2, accepted=0, predicted=8)
    second = written(tracker)
    assert second["mtp_1_acceptance_rate"] == 0.0
    assert second["mtp_1_cumulative_acceptance_rate"] == 100 * 6 / 16
    assert second["mtp_2_acceptance_rate"] == 0.0  # nothing was predicted: divided by one
    tracker.reset()
    tracker.record(torch.tensor(0.0), 1, 2, accepted=1, predicted=2)
    assert written(tracker)["mtp_1_cumulative_acceptance_rate"] == 50.0


def test_losses_alone_have_no_rates():
    tracker = MTPMetricsTracker()
    tracker.record(torch.tensor(2.0), 1, 1)
    assert written(tracker) == {"mtp_1 loss": 1.0}


def test_a_rank_that_records_nothing_reports_nothing():
    assert written(MTPMetricsTracker()) == {}


def test_steps_are_kept_or_dropped_as_a_whole():
    tracker, totals = MTPMetricsTracker(), {}
    for value, is_kept in ((1.0, True), (100.0, False), (3.0, True)):
        tracker.record(torch.tensor(value), 1, 1)
        (tracker.commit_step if is_kept else tracker.discard_step)()
    assert written(tracker, total_loss_dict=totals, num_steps=2) == {"mtp_1 loss": 1.0}
    assert totals["mtp_1 loss"].tolist() == [2.0]


def test_wandb_gets_one_call():
    tracker, wandb = MTPMetricsTracker(), mock.Mock()
    tracker.record(torch.tensor(2.0), 1, 1)
    tracker.report(1.0, 9, None, wandb)
    assert wandb.log.mock_calls == [mock.call({"mtp_1 loss": 2.0}, 9)]


def test_wrong_arguments_are_refused():
    tracker = MTPMetricsTracker()
    tracker.record(torch.tensor(1.0), 1, 2)
    with pytest.raises(ValueError, match="depth is 3"):
        tracker.record(torch.tensor(1.0), 3, 2)
    with pytest.raises(ValueError, match="num_depths is 1 but was 2"):
        tracker.record(torch.tensor(1.0), 1, 1)
    with pytest.raises(ValueError, match="or neither"):
        tracker.record(torch.tensor(1.0), 1, 2, accepted=1)


def test_the_tracker_of_the_process():
    assert get_mtp_metrics_tracker() is get_mtp_metrics_tracker()


def reduced():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tracker = MTPMetricsTracker()
    tracker.record(
        torch.tensor(float(10**rank)),
        1,
        1,
        accepted=rank,
        predicted=10,
        reduce_group=pairs[rank // 2],
        avg_group=across[rank % 2],
    )
    return {name: value.item() for name, value in tracker.take(1.0).items()}


def test_losses_are_summed_then_averaged_and_counts_summed_over_both():
    expected = {
        "mtp_1 loss": 1111.0 / 2,
        "mtp_1_acceptance_rate": 100 * 6 / 40,
        "mtp_1_cumulative_acceptance_rate": 100 * 6 / 40,
    }
    assert run_ranks(reduced, 4) == [pytest.approx(expected)] * 4
