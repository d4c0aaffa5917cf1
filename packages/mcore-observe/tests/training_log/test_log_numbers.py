"""Numbers that the training log is given and shows: bad ones, skipped intervals, other trackers."""

import io
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.observe import GlobalState, MemorySink, TrainState, training_log
from mcore.observe.rank_logging import warn_once


@pytest.fixture
def warnings(caplog):

    warn_once.cache_clear()
    return lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_what_is_no_number_is_one_warning_that_names_it(
    make_state, log_step, printed_line, warnings
):
    sink, totals = MemorySink(), {}
    state = make_state(sinks=[sink])
    for _ in range(2):
        losses = {"lm loss": torch.tensor(2.5), "many": torch.ones(2), "text": "abc"}
        log_step(state, losses, totals, lr=torch.ones(3), grad_norm="abc", params_norm=1.5)
        assert " lm loss: 2.500000E+00 | loss scale: 1.0 | params norm: 1.500 |" in printed_line()
    state.log_metrics({"x": "abc", "vector": torch.ones(2), "good": 1.0})
    assert sink.steps[5]["good"] == 1.0
    assert sink.steps[5]["params-norm"] == 1.5
    assert not {"many", "text", "grad-norm", "x", "vector"} & set(sink.steps[5])
    named = [text.split("'")[1] for text in warnings()]
    assert named == ["many", "text", "learning_rate", "grad_norm", "x", "vector"]


def test_a_console_that_is_gone_does_not_stop_the_run(make_state, log_step, monkeypatch, warnings):
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone)
    log_step(make_state())
    monkeypatch.undo()
    assert len(warnings()) == 1
    assert "cannot write to the console" in warnings()[0]


def test_the_last_four_arguments_are_keyword_only(make_state):
    state = make_state()
    with pytest.raises(TypeError, match="14 positional"):
        training_log(
            {}, {}, None, None, 1.0, False, 0, None, None, None, state.cfg, state, None, None, None
        )


def test_an_interval_without_a_step_that_counts_has_no_loss(make_state, log_step, printed_line):
    state, totals = make_state(step=4), {"lm loss": torch.zeros(1)}
    log_step(state, totals=totals, skipped=1)
    state.train_state.step = 5
    log_step(state, totals=totals, skipped=1)
    line = printed_line()
    assert "lm loss" not in line
    assert " number of skipped iterations:   2 |" in line


def test_averages_are_divided_in_float64(make_state, log_step, printed_line):
    state, totals = make_state(step=2), {}
    losses = torch.tensor([0.46988463401794434, 0.4698846, 0.46988451])
    for step, loss in zip((3, 4, 5), losses, strict=True):
        state.train_state.step = step
        log_step(state, {"lm loss": loss}, totals)
    total = torch.zeros(1)
    for loss in losses:
        total += loss
    assert f" lm loss: {total.item() / 3:.6E} |" in printed_line()


class Router:
    """Megatron-LM's tracker: called at every step, its losses go to the totals or to the text."""

    def __init__(self):
        self.value = 0.0

    def report(self, loss_scale, iteration, writer, wandb_writer=None, total_loss_dict=None):
        writer.add_scalar("load_balancing_loss", self.value, iteration)
        if total_loss_dict is None:
            return f" load_balancing_loss: {self.value:.2f} |"
        known = total_loss_dict.get("load_balancing_loss", torch.zeros(1))
        total_loss_dict["load_balancing_loss"] = known + self.value
        return f" tokens dropped: {self.value:.0f} |"


@pytest.fixture
def newer_megatron(monkeypatch):
    """Puts Megatron-LM's tracker in the module where it lives now."""
    router = Router()
    module = ModuleType("megatron.core.transformer.moe.moe_logging")
    module.get_moe_metrics_tracker = lambda: router
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return router


def test_metrics_of_megatrons_router_between_lines(
    newer_megatron, make_state, log_step, printed_line
):
    from mcore.observe import get_moe_metrics_tracker

    get_moe_metrics_tracker.cache_clear()
    model = SimpleNamespace(
        num_moe_experts=4,
        num_layers=2,
        moe_router_load_balancing_type="aux_loss",
        moe_z_loss_coeff=None,
        moe_layer_freq=1,
        mtp_num_layers=None,
    )
    sink, totals = MemorySink(), {}
    state = make_state(step=0, sinks=[sink], model=model)
    for step, (value, skipped) in enumerate([(1, 0), (2, 0), (6, 0), (7, 0), (100, 1)], 1):
        state.train_state.step = step
        newer_megatron.value = float(value)
        log_step(state, {}, totals, skipped=skipped)
    assert sink.steps[5]["load_balancing_loss"] == 4.0  # the mean of the steps since the last one
    line = printed_line()
    assert line.count("load_balancing_loss") == 1
    assert " load_balancing_loss: 4.000000E+00 |" in line
    assert line.endswith(" tokens dropped: 7 |")


def test_data_parallel_ranks_come_from_the_groups(make_state, log_step, world_of_eight):
    sink = MemorySink()
    state = make_state(sinks=[sink])
    state.cfg.data_parallel_size = None
    state.cfg.train.global_batch_size = 1
    log_step(state, pg_collection=SimpleNamespace(dp=dist.group.WORLD))
    assert sink.steps[5]["batch-size"] == 16
    log_step(state, pg_collection=SimpleNamespace(dp=dist.new_group([5, 7])))
    assert sink.steps[5]["batch-size"] == 4
    log_step(state, pg_collection=SimpleNamespace(tp=dist.group.WORLD))
    assert sink.steps[5]["batch-size"] == 2


def test_without_groups_every_rank_is_a_data_parallel_one(make_state, log_step, monkeypatch):
    sink = MemorySink()
    state = make_state(sinks=[sink])
    state.cfg.data_parallel_size = None
    state.cfg.train.global_batch_size = 1
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    log_step(state)
    assert sink.steps[5]["batch-size"] == 6


def test_only_the_last_rank_writes_to_sinks_of_the_user(monkeypatch):
    kept = {}
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        kept[rank] = MemorySink()
        state = GlobalState(train_state=TrainState(step=1), extra_sinks=[kept[rank]])
        state.log_metrics({"a": 1.0})
        state.close()
    assert [kept[rank].steps for rank in range(2)] == [{}, {1: {"a": 1.0}}]


def test_every_sink_is_told_how_the_run_ended():
    told = []

    class Sink:
        def log(self, metrics, step): ...
        def flush(self): ...
        def close(self, status="FINISHED"):
            told.append(status)

    class Older(Sink):
        def close(self):
            told.append("closed")

    with pytest.raises(RuntimeError), GlobalState(extra_sinks=[Sink(), Older()]):
        raise RuntimeError
    assert told == ["FAILED", "closed"]
