"""Time, throughput and energy between two console lines."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mcore.observe import MemorySink


@pytest.mark.usefixtures("on_each_device")
def test_throughput_of_eight_ranks(make_state, log_step, world_of_eight, capsys):
    sink = MemorySink()
    state = make_state(
        sinks=[sink],
        log_throughput=True,
        log_throughput_to_tensorboard=True,
        log_timers_to_tensorboard=True,
    )
    state._flops_at_last_log = 100e12
    state.train_state.floating_point_operations_so_far = 108e12
    state.timers("interval-time", log_level=0).set_elapsed(0.5)
    log_step(state)
    assert sink.steps[5]["throughput/tflops/device"] == pytest.approx(2.0)
    assert sink.steps[5]["throughput/tflops"] == pytest.approx(16.0)
    assert sink.steps[5]["iteration-time"] == pytest.approx(0.5)
    assert state._flops_at_last_log == 108e12
    out = capsys.readouterr().out
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in out
    assert "Step Time" not in out  # rank 0 prints that one


@pytest.mark.usefixtures("on_each_device")
def test_rank_0_prints_the_step_time_before_the_line(make_state, log_step, capsys):
    state = make_state(log_throughput=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers("interval-time", log_level=0).set_elapsed(1.5)
    log_step(state)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Step Time : 1.50s GPU utilization: 2.0MODEL_TFLOP/s/GPU"
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in second


@pytest.mark.usefixtures("on_each_device")
def test_first_interval_of_a_resumed_run_has_no_throughput(make_state, log_step, capsys):
    state = make_state(step=905, log_throughput=True)
    state.train_state.floating_point_operations_so_far = 900e12
    timer = state.timers("interval-time", log_level=0)
    timer.set_elapsed(0.5)
    log_step(state, loaded_iteration=900)
    assert "throughput" not in capsys.readouterr().out
    assert state._flops_at_last_log == 900e12
    state.train_state.step = 910
    state.train_state.floating_point_operations_so_far = 902e12
    timer.set_elapsed(0.5)
    log_step(state, loaded_iteration=900)
    assert " throughput per GPU (TFLOP/s/GPU): 4.0 |" in capsys.readouterr().out


@pytest.mark.usefixtures("on_each_device")
def test_no_time_means_no_throughput(make_state, log_step, printed_line):
    state = make_state(log_throughput=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers = mock.MagicMock()
    state.timers.return_value.elapsed.return_value = 0.0
    log_step(state)
    line = printed_line()
    assert " elapsed time per iteration (ms): 0.0 |" in line
    assert "throughput" not in line


@pytest.mark.usefixtures("on_each_device")
def test_time_between_calls_without_a_timer(make_state, log_step, printed_line, monkeypatch):
    now = iter([10.0, 10.4, 10.4, 10.8])  # first call; second call's line; its new anchor; unused
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    state, totals = make_state(step=1, log_interval=2, tensorboard_log_interval=2), {}
    log_step(state, totals=totals)
    state.train_state.step = 2
    log_step(state, totals=totals)
    assert " elapsed time per iteration (ms): 400.0 |" in printed_line()


@pytest.mark.usefixtures("on_each_device")
def test_time_between_calls_where_foreign_timers_fail(
    make_state, log_step, printed_line, monkeypatch
):
    now = iter([1.0, 3.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    state, totals = make_state(log_interval=3, tensorboard_log_interval=3), {}
    state.timers = mock.MagicMock(side_effect=Exception("dummy timer"))
    for step in (1, 2, 3):
        state.train_state.step = step
        log_step(state, totals=totals)
    # Two steps in two seconds; the first one of the three began before anybody looked.
    assert " elapsed time per iteration (ms): 1000.0 |" in printed_line()


@pytest.mark.usefixtures("on_each_device")
def test_the_timer_counts_and_then_goes_on(make_state, log_step, printed_line, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    state = make_state()
    timer = state.timers("interval-time", log_level=0)
    timer.set_elapsed(0.5)
    log_step(state)
    assert " elapsed time per iteration (ms): 500.0 |" in printed_line()
    timer.start()
    now[0] += 2.0
    log_step(state)
    assert " elapsed time per iteration (ms): 2000.0 |" in printed_line()
    assert timer.is_running


@pytest.mark.usefixtures("on_each_device")
def test_asking_for_the_time_never_makes_the_timer(make_state, log_step):
    state = make_state(timing_log_level=2)
    log_step(state)
    state.timers("interval-time", log_level=0)  # a level of its own is still free


@pytest.mark.usefixtures("on_each_device")
def test_a_time_that_nobody_measured_is_nan(make_state, log_step, printed_line):
    log_step(make_state())
    assert " elapsed time per iteration (ms): nan |" in printed_line()


@pytest.mark.usefixtures("on_each_device")
def test_energy_of_a_gpu_for_a_step(make_state, log_step, printed_line, world_of_eight):
    sink = MemorySink()
    state, totals = make_state(sinks=[sink]), {"advanced iterations": 9, "skipped iterations": 0}
    state.energy_monitor = SimpleNamespace(lap=lambda: 1000.0, shutdown=lambda: None)
    state.timers("interval-time", log_level=0).set_elapsed(1.0)
    log_step(state, totals=totals)
    # 1000 J over 10 steps and 8 GPUs, at 0.1 s a step.
    assert sink.steps[5]["iter-energy/gpu"] == pytest.approx(12.5)
    assert sink.steps[5]["power/gpu"] == pytest.approx(125.0)
    line = printed_line()
    assert " energy per GPU (J/iter/GPU): 12.5 | power per GPU (W/GPU): 125.0 |" in line


@pytest.mark.usefixtures("on_each_device")
def test_energy_counts_from_the_first_step(make_state, log_step, monkeypatch):
    readings = iter([1000, 4000])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("mcore.observe.reports._open_nvml_reader", lambda: lambda: next(readings))
    sink = MemorySink()
    state, totals = make_state(step=1, sinks=[sink], log_energy=True), {}
    for step in range(1, 6):
        state.train_state.step = step
        log_step(state, totals=totals)
    assert sink.steps[5]["iter-energy/gpu"] == pytest.approx(3.0 / 5)


@pytest.mark.usefixtures("on_each_device")
def test_unknown_energy_is_left_out(make_state, log_step, capsys):
    state = make_state()
    state.energy_monitor = SimpleNamespace(lap=lambda: math.nan, shutdown=lambda: None)
    log_step(state)
    assert "energy" not in capsys.readouterr().out


@pytest.mark.usefixtures("on_each_device")
def test_energy_without_a_time_has_no_power(make_state, log_step, printed_line):
    state = make_state()
    state.energy_monitor = SimpleNamespace(lap=lambda: 400.0)
    log_step(state, totals={"advanced iterations": 9})
    line = printed_line()
    assert " energy per GPU (J/iter/GPU): 40.0 |" in line
    assert "power" not in line


@pytest.fixture
def tflops_of(make_state, log_step):
    """Returns a function that logs steps of one run: TFLOP so far to TFLOP/s of the interval."""
    sink = MemorySink()
    state = make_state(sinks=[sink], log_throughput_to_tensorboard=True)

    def log(step, so_far, *, loaded=0, anchor=None):
        state.train_state.step = step
        state.train_state.floating_point_operations_so_far = so_far
        if anchor is not None:
            state._flops_at_last_log = anchor
        state.timers("interval-time", log_level=0).set_elapsed(1e-12)
        log_step(state, loaded_iteration=loaded)
        return sink.steps.get(step, {}).get("throughput/tflops")

    log.state = state
    return log


@pytest.mark.usefixtures("on_each_device")
def test_operations_of_a_new_run_count_from_zero(tflops_of):
    assert tflops_of(5, 3.0) == pytest.approx(3.0)
    assert tflops_of(10, 10.0) == pytest.approx(7.0)


@pytest.mark.usefixtures("on_each_device")
def test_operations_of_a_resumed_run_count_from_its_second_interval(tflops_of):
    assert tflops_of(101, 900.0, loaded=100) is None
    assert tflops_of(105, 910.0, loaded=100) is None
    assert tflops_of(110, 930.0, loaded=100) == pytest.approx(20.0)


@pytest.mark.usefixtures("on_each_device")
def test_operations_count_from_an_anchor_that_the_caller_has_set(tflops_of):
    assert tflops_of(105, 910.0, loaded=100, anchor=900.0) == pytest.approx(10.0)
    assert tflops_of(110, 5.0, loaded=100) == 0  # the run went back


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("so_far", [None, "many"])
def test_operations_that_nobody_counts(so_far, tflops_of):
    assert tflops_of(5, so_far) is None
    assert tflops_of.state._flops_at_last_log is None


@pytest.mark.usefixtures("on_each_device")
def test_a_count_of_exactly_zero_is_a_number(tflops_of):
    assert tflops_of(5, 0) == 0.0
