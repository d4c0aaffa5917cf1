import math
from types import SimpleNamespace

import pytest
from mcore.observe.steplog.interval import IntervalClock, IntervalFlops, measure_energy

from mcore.observe import Timers


def flops_state(so_far, **anchor):
    train_state = SimpleNamespace(floating_point_operations_so_far=so_far)
    return SimpleNamespace(train_state=train_state, **anchor)


def test_a_new_run_counts_from_zero_and_moves_its_anchor():
    flops, state = IntervalFlops(), flops_state(3.0)
    flops.seed(state, loaded_iteration=0)
    assert flops.take(state) == 3.0
    state.train_state.floating_point_operations_so_far = 10.0
    flops.seed(state, loaded_iteration=0)
    assert flops.take(state) == 7.0


def test_a_resumed_run_counts_from_its_second_interval():
    flops, state = IntervalFlops(), flops_state(900.0)
    flops.seed(state, loaded_iteration=100)
    state.train_state.floating_point_operations_so_far = 910.0
    flops.seed(state, loaded_iteration=100)
    assert flops.take(state) is None
    state.train_state.floating_point_operations_so_far = 930.0
    assert flops.take(state) == 20.0


def test_an_anchor_that_the_caller_has_set_counts():
    flops, state = IntervalFlops(), flops_state(910.0, _flops_at_last_log=900.0)
    flops.seed(state, loaded_iteration=100)
    assert flops.take(state) == 10.0
    state.train_state.floating_point_operations_so_far = 5.0  # the run went back
    assert flops.take(state) == 0


@pytest.mark.parametrize("so_far", [None, "many", 0])
def test_nobody_counts(so_far):
    flops, state = IntervalFlops(), flops_state(so_far)
    flops.seed(state, loaded_iteration=0)
    assert flops.take(state) is None
    assert not hasattr(state, "_flops_at_last_log")


def test_the_timer_counts_and_then_goes_on():
    timers, clock = Timers(0, "max"), IntervalClock()
    timer = timers("interval-time", log_level=0)
    timer.set_elapsed(0.5)
    assert clock.take_seconds(timers, 5) == 0.5
    timer.start()
    assert 0 < clock.take_seconds(timers, 5) < 10
    assert timer.is_running


def test_timers_of_others_that_fail_leave_it_to_the_time_between_calls(monkeypatch):
    def broken(name):
        raise Exception("dummy timer")

    now = iter([1.0, 3.0, 3.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = IntervalClock()
    clock.note_call()
    clock.note_call()
    clock.note_call()
    # Two steps in two seconds; the first one of the three began before anybody looked.
    assert clock.take_seconds(broken, 3) == 3.0


def test_asking_never_makes_the_timer():
    timers = Timers(2, "max")
    assert IntervalClock().take_seconds(timers, 1) is None
    timers("interval-time", log_level=0)  # a level of its own is still free


def test_energy():
    monitor = SimpleNamespace(lap=lambda: 400.0)
    assert measure_energy(monitor, 10, 0.5, 4) == (10.0, 20.0)
    assert measure_energy(monitor, 10, None, 4) == (10.0, None)
    assert measure_energy(SimpleNamespace(lap=lambda: math.nan), 10, 0.5, 4) == (None, None)
