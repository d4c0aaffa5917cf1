"""What one call of the training log sums, prints and returns, in one process."""

import inspect
import math
import re
from datetime import datetime
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    MemorySink,
    ProfilingConfig,
    TrainingConfig,
    training_log,
)
from mcore.observe.rank_logging import warn_once
from mcore.observe.training_log import console


@pytest.mark.usefixtures("on_each_device")
def test_five_steps_print_one_line_and_reset_the_sums(make_state, log_step, printed_line):
    state = make_state(step=0)
    state.timers("interval-time", log_level=0).set_elapsed(0.5)
    totals = {}
    for step in range(1, 6):
        state.train_state.step = step
        state.train_state.consumed_train_samples = 128 * step
        log_step(state, totals=totals)
    assert printed_line() == (
        " iteration        5/    1000 | consumed samples:          640 |"
        " elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-04 |"
        " global batch size:    64 | lm loss: 2.500000E+00 | loss scale: 1.0 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert totals["lm loss"].tolist() == [0.0]
    assert [totals[f"{kind} iterations"] for kind in ("advanced", "skipped", "nan")] == [0, 0, 0]


@pytest.mark.usefixtures("on_each_device")
def test_no_line_between_intervals(make_state, log_step, capsys):
    totals = {}
    state = make_state(step=101)
    log_step(state, {"lm loss": torch.tensor(2.5)}, totals)
    assert capsys.readouterr().out == ""
    assert totals == {
        "advanced iterations": 1,
        "skipped iterations": 0,
        "nan iterations": 0,
        "lm loss": torch.tensor([2.5]),
    }


@pytest.mark.usefixtures("on_each_device")
def test_skipped_nan_step_counts_and_adds_no_loss(make_state, log_step):
    totals = {}
    log_step(make_state(step=1), {"lm loss": torch.tensor(math.nan)}, totals, skipped=1)
    assert totals == {"advanced iterations": 0, "skipped iterations": 1, "nan iterations": 1}


@pytest.mark.usefixtures("on_each_device")
def test_averages_are_over_advanced_steps(make_state, log_step, printed_line):
    state, totals = make_state(step=0), {}
    steps = [(1.0, 0), (math.nan, 1), (2.0, 0), (7.0, 1), (6.0, 0)]
    for step, (loss, skipped) in enumerate(steps, start=1):
        state.train_state.step = step
        log_step(state, {"lm loss": torch.tensor([loss])}, totals, skipped=skipped)
    line = printed_line()
    assert " lm loss: 3.000000E+00 |" in line
    assert " number of skipped iterations:   2 | number of nan iterations:   1 |" in line


@pytest.mark.usefixtures("on_each_device")
def test_negative_and_nan_averages_are_shown(make_state, log_step, printed_line):
    log_step(make_state(), {"lm loss": torch.tensor(-0.5)})
    assert " lm loss: -5.000000E-01 |" in printed_line()
    log_step(make_state(), {"lm loss": torch.tensor(math.nan)})
    assert " lm loss: NAN |" in printed_line()


@pytest.mark.usefixtures("on_each_device")
def test_unknown_learning_rate_and_length(make_state, log_step, printed_line):
    log_step(make_state(train=TrainingConfig(micro_batch_size=1)), lr=None)
    line = printed_line()
    assert line.startswith(" iteration        5 | consumed samples:")
    assert "learning rate" not in line


@pytest.mark.usefixtures("on_each_device")
def test_every_kind_of_number_is_accepted(make_state, log_step, printed_line):
    numpy = pytest.importorskip("numpy")
    log_step(
        make_state(),
        lr=numpy.float32(0.5),
        loss_scale=torch.tensor([1024.0]),
        grad_norm=torch.tensor(2.5, dtype=torch.bfloat16),
        params_norm=numpy.float64(15.2),
        num_zeros_in_grad=torch.tensor(3),
        log_max_attention_logit=3.25,
    )
    line = printed_line()
    assert " learning rate: 5.000000E-01 |" in line
    assert (
        " loss scale: 1024.0 | grad norm: 2.500 | num zeros: 3 | params norm: 15.200 |"
        " max attention logit: 3.250 |" in line
    )


def test_an_interval_below_one(make_state, log_step):
    with pytest.raises(ValueError, match="logging interval is 0"):
        log_step(make_state(log_interval=0))


def test_skip_train_metrics_log_does_nothing(make_state, log_step, capsys):
    totals = {}
    assert log_step(make_state(skip_train_metrics_log=True), totals=totals, memory=True) is True
    assert totals == {}
    assert capsys.readouterr().out == ""


def test_defaults_of_the_last_four_arguments():
    parameters = inspect.signature(training_log).parameters
    tail = {name: p.default for name, p in list(parameters.items())[-4:]}
    assert tail == {
        "pg_collection": None,
        "log_max_attention_logit": None,
        "loaded_iteration": 0,
        "seq_length": None,
    }


@pytest.fixture
def at_five_past_three(monkeypatch):
    """Stops the clock of the console."""
    now = datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(console, "datetime", SimpleNamespace(now=lambda: now))


@pytest.mark.usefixtures("on_each_device")
def test_all_fields_byte_for_byte(at_five_past_three, make_state, log_step, capsys):
    state = make_state(log_throughput=True)
    state.train_state.skipped_train_samples = 7
    state.train_state.floating_point_operations_so_far = 1e12
    state.timers("interval-time", log_level=0).set_elapsed(0.5)
    state.energy_monitor = SimpleNamespace(lap=lambda: 62.5)
    log_step(
        state,
        totals={"advanced iterations": 4, "lm loss": torch.tensor([10.0])},
        loss_scale=1024.0,
        grad_norm=2.5,
        num_zeros_in_grad=0,
        params_norm=15.2,
        log_max_attention_logit=3.25,
    )
    assert capsys.readouterr().out == (
        "Step Time : 0.10s GPU utilization: 2.0MODEL_TFLOP/s/GPU\n"
        " [2026-01-02 03:04:05] iteration        5/    1000 | consumed samples:          640 |"
        " skipped samples:            7 | elapsed time per iteration (ms): 100.0 |"
        " throughput per GPU (TFLOP/s/GPU): 2.0 | energy per GPU (J/iter/GPU): 12.5 |"
        " power per GPU (W/GPU): 125.0 | learning rate: 1.000000E-04 | global batch size:    64 |"
        " lm loss: 2.500000E+00 | loss scale: 1024.0 | grad norm: 2.500 | num zeros: 0 |"
        " params norm: 15.200 | max attention logit: 3.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


@pytest.mark.usefixtures("on_each_device")
def test_missing_and_odd_numbers_byte_for_byte(at_five_past_three, make_state, log_step, capsys):
    state = make_state(
        step=123456789,
        log_interval=1,
        train=TrainingConfig(micro_batch_size=12500, global_batch_size=100000),
        model=SimpleNamespace(num_moe_experts=2),
    )
    state.train_state.consumed_train_samples = 0
    state.moe_metrics = SimpleNamespace(report=lambda **options: " routed: 1.00 |")
    log_step(
        state,
        {"a": torch.tensor(-0.5), "b": torch.tensor(math.nan), "c": torch.tensor(math.inf)},
        {"skipped iterations": 3, "nan iterations": 12345},
        lr=None,
        loss_scale=0.5,
    )
    assert capsys.readouterr().out == (
        " [2026-01-02 03:04:05] iteration 123456789 | consumed samples:            0 |"
        " elapsed time per iteration (ms): nan | global batch size: 100000 |"
        " a: -5.000000E-01 | b: NAN | c: INF | loss scale: 0.5 |"
        " number of skipped iterations:   3 | number of nan iterations: 12345 | routed: 1.00 |\n"
    )


@pytest.mark.usefixtures("on_each_device")
def test_memory_byte_for_byte(world_of_eight, monkeypatch, make_state, log_step, capsys):
    report = {"mem-allocated-gigabytes": 1.2346, "mem-alloc-retires": 2}
    monkeypatch.setattr(console, "report_memory", lambda keys: report)
    log_step(make_state(step=2, log_interval=2), memory=True)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "[Rank 7] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 1.2346 |"
        " mem-alloc-retires: 2"
    )


@pytest.mark.parametrize(
    ("step", "loaded", "still"), [(1, 0, True), (5, 0, False), (101, 100, True), (102, 100, False)]
)
def test_memory_of_the_first_two_steps(make_state, log_step, step, loaded, still, capsys):
    state = make_state(step=step, log_interval=1)
    assert log_step(state, memory=True, loaded_iteration=loaded) is still
    line = capsys.readouterr().out.splitlines()[-1]
    number = r"\d+(\.\d+)?(e-\d+)?"
    assert re.fullmatch(
        rf"\[Rank 0\] \(after {step} iterations\) memory \(GB\) \| mem-host-rss-gigabytes: "
        rf"{number} \| mem-max-host-rss-gigabytes: {number}",
        line,
    )


@pytest.mark.usefixtures("on_each_device")
def test_memory_is_not_reported_any_more(make_state, log_step, capsys):
    assert log_step(make_state(log_interval=1), memory=False) is False
    assert "memory" not in capsys.readouterr().out


@pytest.mark.usefixtures("on_each_device")
def test_theoretical_memory_is_asked_for(make_state, log_step):
    state, asked = make_state(), []
    state.theoretical_memory_fn = lambda config, microbatches: asked.append((config, microbatches))
    log_step(state, memory=True)
    assert asked == [(state.cfg, 8)]


@pytest.mark.usefixtures("on_each_device")
def test_snapshot_without_cuda_is_a_warning(make_state, log_step, caplog):
    warn_once.cache_clear()
    state = make_state(step=12)
    state.cfg.profiling = ProfilingConfig(record_memory_history=True)
    with mock.patch("torch.cuda.is_available", return_value=False):
        log_step(state)
    assert "needs CUDA" in caplog.text


@pytest.mark.usefixtures("on_each_device")
def test_mocks_serve_as_containers(capsys):
    config, state = mock.MagicMock(), mock.MagicMock()
    config.logger.log_interval = config.logger.tensorboard_log_interval = 5
    config.train.micro_batch_size = 2
    config.data_parallel_size = 4
    config.model.num_moe_experts = config.model.mtp_num_layers = None
    state.train_state.step = 5
    state.train_state.consumed_train_samples = 640
    state.train_state.skipped_train_samples = 0
    state.get_num_microbatches.return_value = 8
    state.timers.return_value.elapsed.return_value = 0.5
    state.energy_monitor = None
    training_log(
        {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
        config, state, None, [mock.MagicMock()],
    )  # fmt: skip
    assert " global batch size:    64 | lm loss: 2.500000E+00 |" in capsys.readouterr().out
    assert state.comet_logger.log_metrics.call_args.args[0]["batch-size"] == 64


@pytest.mark.usefixtures("on_each_device")
def test_plain_namespaces_serve_as_containers(printed_line):
    config = SimpleNamespace(
        logger=SimpleNamespace(log_interval=1),
        train=SimpleNamespace(micro_batch_size=1),
    )
    state = SimpleNamespace(train_state=SimpleNamespace(step=1, consumed_train_samples=1))
    training_log(
        {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
        config, state, None, None,
    )  # fmt: skip
    assert printed_line().startswith(" iteration        1 | consumed samples:")


@pytest.mark.usefixtures("on_each_device")
def test_both_entries_log_the_same_values():
    """``training_log`` and ``GlobalState.log_step`` build the same input."""
    train = TrainingConfig(micro_batch_size=2)
    config = ConfigContainer(logger=LoggerConfig(log_interval=1), train=train)
    sinks = MemorySink(), MemorySink()
    losses = {"lm loss": torch.tensor(2.5)}
    counted = GlobalState(config, extra_sinks=[sinks[0]])
    counted.log_step(losses, lr=1e-4, grad_norm=torch.tensor(0.5))
    called = GlobalState(config, extra_sinks=[sinks[1]])
    called.train_state.step, called.train_state.consumed_train_samples = 1, 2
    rate, norm = 1e-4, torch.tensor(0.5)
    training_log(
        losses, {}, rate, None, 1.0, False, 0, norm, None, None, config, called, None, None
    )
    assert sinks[0].steps == sinks[1].steps
    assert sinks[0].steps[1]["grad-norm"] == 0.5
