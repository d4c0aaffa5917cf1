import collections
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import TrainState, report_runtime, report_throughput, reports

TRAIN = SimpleNamespace(micro_batch_size=4, global_batch_size=64)


def runtime(monkeypatch, *, step, elapsed=50.0, samples=1000, seq=2048, iters=1000, **options):
    monkeypatch.setattr("time.time", lambda: 1000.0 + elapsed)
    state = TrainState(step=step, consumed_train_samples=samples)
    return report_runtime(state, 1000.0, seq, iters, **options)


def test_time_used_and_left(monkeypatch):
    assert runtime(monkeypatch, step=100) == pytest.approx(
        {
            "time/remaining_estimate": 450.0,
            "time/tokens": 2_048_000,
            "time/samples": 1000,
            "time/batches": 100,
            "time/total": 50.0,
        }
    )


@pytest.mark.parametrize(
    ("unit", "seconds"), [("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400)]
)
def test_units(unit, seconds, monkeypatch):
    report = runtime(monkeypatch, step=100, elapsed=86400.0, time_unit=unit)
    assert report["time/total"] == pytest.approx(86400 / seconds)
    assert report["time/remaining_estimate"] == pytest.approx(9 * 86400 / seconds)


def test_unknown_unit_is_refused_before_anything_else():
    with pytest.raises(ValueError, match="time_unit is 'weeks'"):
        report_runtime(None, 0, 1, 1, "weeks")


def test_a_resumed_run_counts_its_own_steps(monkeypatch):
    report = runtime(monkeypatch, step=901, elapsed=10.0, start_step=900)
    assert report["time/remaining_estimate"] == pytest.approx(990.0)


def test_no_estimate_before_the_first_step_or_without_an_end(monkeypatch):
    for options in ({"step": 0}, {"step": 900, "start_step": 900}, {"step": 5, "iters": None}):
        assert "time/remaining_estimate" not in runtime(monkeypatch, **options)
    assert runtime(monkeypatch, step=1200)["time/remaining_estimate"] == 0.0


def test_no_tokens_without_a_length(monkeypatch):
    assert "time/tokens" not in runtime(monkeypatch, step=5, seq=None)


def test_rates_over_a_window():
    stamps = [0.9, 1.7, 2.9, 4.2, 5.9]
    assert report_throughput(TRAIN, 5, 4096, stamps, 5) == pytest.approx(
        {
            "throughput/batches_per_sec": 0.8,
            "throughput/samples_per_sec": 51.2,
            "throughput/tokens_per_sec": 209715.2,
            "throughput/device/batches_per_sec": 0.8,
            "throughput/device/samples_per_sec": 51.2,
            "throughput/device/tokens_per_sec": 209715.2,
            "throughput/micro_batch_size": 4,
            "throughput/global_batch_size": 64,
        }
    )


def test_rates_of_a_device():
    report = report_throughput(TRAIN, 5, 0, [0.0, 1.0], 2, world_size=8)
    assert report["throughput/device/samples_per_sec"] == 8.0
    assert not any("tokens" in name for name in report)


@pytest.mark.parametrize("window", [2, 10, 100])
@pytest.mark.parametrize("kind", [list, lambda s: collections.deque(s, maxlen=101)])
def test_a_steady_rate_is_what_it_is_for_every_window(window, kind):
    stamps = kind([float(i) for i in range(300)])
    report = report_throughput(TRAIN, 300, None, stamps, window)
    assert report["throughput/batches_per_sec"] == 1.0


@pytest.mark.parametrize(
    ("history", "window"), [(None, 2), ([], 2), ([1.0], 2), ([1.0, 2.0], 1), ([1.0, 2.0], 3)]
)
def test_too_little_history(history, window, caplog):
    assert report_throughput(TRAIN, 5, 1, history, window) == {}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("history", "why"),
    [([1.0, 1.0], "span no time"), ([0.5, 0.4, 0.6], "decrease"), ([3.0, 1.0], "decrease")],
)
def test_stamps_that_cannot_be_are_a_warning_on_rank_0(history, why, caplog, monkeypatch):
    assert report_throughput(TRAIN, 77, 1, history, 2) == {}
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "iteration 77" in record.getMessage()
    assert "elapsed_wct" in record.getMessage()
    caplog.clear()
    monkeypatch.setattr(reports, "process_rank", lambda: 1)
    assert report_throughput(TRAIN, 77, 1, history, 2) == {}
    assert caplog.records == []


@settings(deadline=None)
@given(
    st.lists(st.floats(0.001, 100.0), min_size=1, max_size=30),
    st.integers(2, 40),
)
def test_rate_times_span_is_the_number_of_steps(durations, window):
    stamps = [0.0]
    for duration in durations:
        stamps.append(stamps[-1] + duration)
    report = report_throughput(TRAIN, 1, None, stamps, window, world_size=1)
    used = stamps[-(window + 1) :]
    if len(stamps) < window:
        assert report == {}
    else:
        rate = report["throughput/batches_per_sec"]
        assert math.isclose(rate * (used[-1] - used[0]), len(used) - 1, rel_tol=1e-9)
