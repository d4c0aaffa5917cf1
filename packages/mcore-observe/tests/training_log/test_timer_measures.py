"""Timers in the training log: what sinks and console get of them, at their own intervals."""

import logging
import re
from types import SimpleNamespace
from unittest import mock

import pytest

from mcore.observe import MemorySink


def _foreign_timers(elapsed):
    timers = mock.MagicMock()
    timers.return_value.elapsed.return_value = elapsed
    return timers


def test_foreign_timers_write_themselves(make_state, log_step):
    state, totals = make_state(log_timers_to_tensorboard=True, timing_log_level=1), {}
    state.timers = timers = _foreign_timers(elapsed=0.5)
    trackers = {name: mock.Mock() for name in ("tensorboard", "wandb", "mlflow", "comet")}
    for name, client in trackers.items():
        setattr(state, f"{name}_logger", client)
    log_step(state, totals=totals | {"advanced iterations": 4, "skipped iterations": 0})
    names = timers.write.call_args.args[0]
    assert names[0] == "forward-backward"
    assert timers.write.call_args == mock.call(
        names, trackers["tensorboard"], 5, normalizer=5, reset=False
    )
    assert timers.write_to_wandb.call_args == mock.call(
        names, trackers["wandb"], 5, normalizer=5, reset=False
    )
    assert timers.write_to_comet.call_args == mock.call(
        names, trackers["comet"], 5, normalizer=5, reset=True
    )
    assert timers.log.call_args == mock.call(names, normalizer=5)
    assert timers.return_value.elapsed.call_args == mock.call(barrier=True)


def test_foreign_timers_that_only_write_reset_there(make_state, log_step):
    state = make_state(log_timers_to_tensorboard=True, timing_log_level=1)
    written = []
    state.timers = SimpleNamespace(
        write=lambda *args, **options: written.append(options),
        log=lambda names, normalizer: None,
    )
    log_step(state)
    assert written == [{"normalizer": 1, "reset": True}]


def test_sinks_and_console_have_timer_intervals_of_their_own(make_state, log_step, caplog):
    caplog.set_level(logging.INFO, logger="mcore.observe")
    sink = MemorySink()
    state = make_state(
        step=0,
        sinks=[sink],
        tensorboard_log_interval=2,
        log_interval=3,
        timing_log_level=1,
        timing_log_option="max",
        log_timers_to_tensorboard=True,
    )
    totals = {}
    timer = state.timers("forward-backward", log_level=1)
    for step, seconds in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start=1):
        timer.set_elapsed(timer.elapsed(reset=False) + seconds)
        state.train_state.step = step
        log_step(state, totals=totals)
    times = {step: got.get("forward-backward-time") for step, got in sink.steps.items()}
    assert times == {2: 1.5, 3: None, 4: 3.5, 6: 5.5}
    texts = [r.getMessage() for r in caplog.records if r.name.startswith("mcore.observe.timers")]
    assert [re.search(r": ([\d.]+)$", text)[1] for text in texts] == ["2000.00", "5000.00"]


@pytest.mark.parametrize(("level", "count"), [(-1, 0), (0, 0), (1, 12), (2, 24)])
def test_timers_of_each_level(level, count, make_state, log_step):
    state = make_state(log_timers_to_tensorboard=True, timing_log_level=level)
    state.timers = timers = _foreign_timers(elapsed=0.5)
    log_step(state)
    for method in (timers.write, timers.log):
        assert len(method.call_args.args[0]) == count


def test_foreign_timers_that_fail_are_one_warning(make_state, log_step, caplog):
    state = make_state(log_timers_to_tensorboard=True)
    state.timers = timers = _foreign_timers(elapsed=0.5)
    timers.write.side_effect = OSError("no disk")
    for step in (5, 10):
        state.train_state.step = step
        log_step(state)
    assert [r.getMessage() for r in caplog.records] == ["writing timers failed: OSError: no disk"]
