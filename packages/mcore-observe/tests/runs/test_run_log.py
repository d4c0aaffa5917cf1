"""The log of a run in one object: its counters, its files, and a run that goes on."""

import io
import json
import math
import re
import sys
import time
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist

from mcore.observe import GlobalState, JsonlSink, MemorySink, Outlier, RunLog
from mcore.observe.runs import Run, log_slow_ranks
from rank_testing import preload, run_ranks

preload("mcore.observe")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_counters_totals_and_scalars_are_kept(tmp_path, capsys):
    kept = MemorySink()
    with RunLog(tmp_path, batch_size=4, seq_length=10, log_every=2, sinks=[kept]) as log:
        for step in range(1, 7):
            log.log_step(torch.tensor(float(step)), lr=0.5, accuracy=step / 10, bad="abc")
        log.log_step({"loss": torch.tensor(9.0)}, samples=100, skipped=True)
        assert log.train_state.step == 7
        assert log.train_state.consumed_train_samples == 124
        assert log.train_state.skipped_train_samples == 100
    averages = re.findall(r" \| loss: (\S+) \|", capsys.readouterr().out)
    assert list(map(float, averages)) == [1.5, 3.5, 5.5]
    assert list(kept.steps) == [2, 4, 6]
    assert kept.steps[4]["accuracy"] == 0.4
    assert [line["accuracy"] for line in lines_of(tmp_path)] == [0.2, 0.4, 0.6]


def test_a_metric_that_replaces_a_value_of_the_log_is_a_warning(tmp_path, caplog):
    with RunLog(tmp_path, batch_size=4, log_every=1) as log:
        for step in (1, 2):
            log.log_step(torch.tensor(1.0), lr=0.5, **{"batch-size": step, "accuracy": 1.0})
    messages = [one.getMessage() for one in caplog.records]
    text = "the metric 'batch-size' replaces that of the log: give it another name"
    assert messages.count(text) == 1
    assert Run.read(tmp_path).curves["batch-size"] == {1: 1.0, 2: 2.0}


def losses_shown(folder, options):
    """Log 3, 6, 12 on rank 0 to 2, and then twice that. Return the values that this rank showed."""
    kept, shown = MemorySink(), io.StringIO()
    own = torch.tensor(3.0 * 2 ** dist.get_rank(), requires_grad=True)
    group, options = None, dict(options)
    if options.pop("pairs", False):  # the last rank is alone with rank 1
        first, others = dist.new_group([0]), dist.new_group([1, 2])
        group = others if dist.get_rank() else first
    with redirect_stdout(shown), RunLog(folder, log_every=2, sinks=[kept]) as log:
        for factor in (1, 2):
            log.log_step({"a": factor * own, "b": 1.0}, dp_group=group, **options)
        with pytest.raises(ValueError, match="reduce='sum'"):
            log.log_step(own, reduce="sum")
    fields = re.findall(r"\| ((?:max )?[ab]): (\S+)", shown.getvalue())
    return [step["a"] for step in kept.steps.values()], [(n, float(v)) for n, v in fields]


@pytest.mark.parametrize(
    ("options", "logged", "average"),
    [
        ({}, 14.0, 10.5),
        ({"reduce": "mean", "pairs": True}, 18.0, 13.5),
        ({"reduce": "max"}, 24.0, 18.0),
        ({"reduce": "last"}, 24.0, 18.0),
    ],
    ids=str,
)
def test_the_loss_is_the_mean_over_data_parallel_ranks(tmp_path, options, logged, average):
    first, second, last = run_ranks(losses_shown, 3, tmp_path, options)
    assert first == second == ([], [])
    shown = [("a", average), ("b", 1.0)]
    if average != 18.0:
        shown.insert(1, ("max a", 18.0))
    assert last == ([logged], shown)
    assert [line["a"] for line in lines_of(tmp_path)] == [logged]


def uneven_losses(folder):
    """Only ranks 1 and 3 have a loss, as with two pipeline stages of two replicas."""
    rank, kept = dist.get_rank(), MemorySink()
    with RunLog(folder, log_every=1, sinks=[kept], console_format="megatron") as log:
        log.log_step({"a": float(rank)} if rank % 2 else {})
        log.log_step({"a": math.nan if rank == 1 else 2.0} if rank % 2 else {})
        log.log_step({"a": 5.0} if rank == 3 else {"b": 7.0})
    return [step["a"] for step in kept.steps.values()]


def test_ranks_without_a_loss_and_with_other_losses_do_not_count(tmp_path):
    *_, last = run_ranks(uneven_losses, 4, tmp_path)
    assert last[0] == 2.0
    assert math.isnan(last[1])
    assert last[2] == 5.0


def sink_steps_between_lines(folder):
    kept, shown = MemorySink(), io.StringIO()
    settings = {"log_every": 3, "tensorboard_log_interval": 1}
    with redirect_stdout(shown), RunLog(folder, sinks=[kept], **settings) as log:
        for step in (1.0, 2.0, 3.0):
            log.log_step(step + 10 * dist.get_rank())
    return [step["loss"] for step in kept.steps.values()], "loss: 7.000000E+00" in shown.getvalue()


def test_trackers_get_the_mean_of_each_of_their_steps(tmp_path):
    first, last = run_ranks(sink_steps_between_lines, 2, tmp_path)
    assert first == ([], False)
    assert last == ([6.0, 7.0, 8.0], True)


def test_a_loss_that_does_not_come_again_is_not_shown_as_0(tmp_path, capsys):
    with RunLog(tmp_path, log_every=1) as log:
        for losses in ({"a": 1.0, "b": 2.0}, {"a": 3.0}, {"b": None}, {"b": 5.0}):
            log.log_step(losses)
    shown = [
        re.findall(r" \| ([ab]): (\S+)", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert [[(name, float(value)) for name, value in line] for line in shown if line] == [
        [("a", 1.0), ("b", 2.0)], [("a", 3.0)], [("b", 5.0)],
    ]  # fmt: skip


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    kept = MemorySink()
    settings = {"log_every": 1, "tensorboard": True, "closing_s": 0.01}
    with RunLog(tmp_path / "file" / "run", sinks=[kept], **settings) as log:
        log.log_step(1.0)
        log.log_step(2.0)
    assert [values["loss"] for values in kept.steps.values()] == [1.0, 2.0]
    assert [r.levelname for r in caplog.records if "metrics.jsonl" in r.message] == ["WARNING"]


def test_a_run_that_goes_on_after_a_checkpoint(tmp_path):
    with RunLog(tmp_path, batch_size=4, log_every=1) as log:
        for step in range(1, 6):
            log.log_step({"loss": float(step)})
            if step == 3:
                checkpoint = log.state_dict()
    with RunLog(tmp_path, batch_size=4, log_every=1) as log:
        log.load_state_dict(checkpoint)
        for _ in range(3):
            log.log_step({"loss": 10.0})
    names = ("step", "loss", "samples vs steps")
    assert [tuple(line[name] for name in names) for line in lines_of(tmp_path)] == [
        (1, 1.0, 4), (2, 2.0, 8), (3, 3.0, 12), (4, 10.0, 16), (5, 10.0, 20), (6, 10.0, 24),
    ]  # fmt: skip


def test_a_new_run_in_an_old_folder_sets_the_old_curves_aside(tmp_path, caplog):
    for start, steps in enumerate((5, 3, 2)):
        with RunLog(tmp_path, log_every=1) as log:
            for step in range(1, steps + 1):
                log.log_step({"loss": 10.0 * start + step})
            checkpoint = log.state_dict()
            log_slow_ranks(tmp_path, step, [Outlier("forward", start, "h", 40.0, 10.0, 9.0, 0.2)])
    assert Run.read(tmp_path).points("loss") == [(1, 21.0), (2, 22.0)]
    assert [found[0].rank for found in Run.read(tmp_path).slow.values()] == [2]
    for number, steps in ((1, 5), (2, 3)):
        kept = Run.read(tmp_path / f"metrics.{number}.jsonl")
        assert len(kept.points("loss")) == steps
        assert (tmp_path / f"slow_ranks.{number}.jsonl").read_text().count("\n") == 1
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert (
        f"{tmp_path} had the metrics of an earlier run, which are now in metrics.1" in warnings[0]
    )

    caplog.clear()
    with RunLog(tmp_path, log_every=1) as log:
        log.log_metrics({"before": 0.5})  # which opens the file, and nothing is known yet
        log.load_state_dict(checkpoint)
        log.log_step({"loss": 5.0})
        with RunLog(tmp_path, log_every=1) as other:
            other.log_step({"loss": 6.0})
    assert [line["loss"] for line in lines_of(tmp_path) if "loss" in line] == [21.0, 22.0, 5.0, 6.0]
    (warning,) = caplog.records
    assert "another run writes" in warning.getMessage()


def test_tokens_and_the_wait_for_data_are_shown(tmp_path, capsys):
    with RunLog(tmp_path, batch_size=4, seq_length=10, log_every=2) as log:
        for _ in range(2):
            with log.data():
                time.sleep(0.02)
            log.log_step({"loss": 1.0}, tokens=1_000_000_000)
    found = re.search(
        r"step ms: ([\d.]+) \| tokens/s: ([\d,]+) \| data %: [\d.]+ \|", capsys.readouterr().out
    )
    assert found
    tokens = int(found[2].replace(",", ""))
    assert tokens == pytest.approx(1e9 / (float(found[1]) / 1e3), rel=0.01)


def test_a_call_may_stand_for_several_steps_whose_losses_are_averages(tmp_path, capsys):
    kept = MemorySink()
    with RunLog(tmp_path, batch_size=4, log_every=4, sinks=[kept]) as log:
        log.log_step({"loss": 1.0}, steps=3, samples=12)
        log.log_step({"loss": 5.0})
        log.log_step({"loss": 2.0}, steps=10, samples=40)  # ends the intervals of steps 8 and 12
        assert log.state_dict()["consumed_train_samples"] == 56
    assert re.findall(r" \| loss: (\S+) \|", capsys.readouterr().out) == [
        "2.000000E+00", "2.000000E+00",
    ]  # fmt: skip
    assert {step: values["loss"] for step, values in kept.steps.items()} == {4: 5.0, 14: 2.0}


def test_a_state_of_another_configuration_counts_too():
    kept = MemorySink()
    state = GlobalState(extra_sinks=[kept])
    state.log_step({"loss": torch.tensor(1.0)}, grad_norm=torch.tensor(2.0))
    assert kept.steps[1]["grad-norm"] == 2.0


def test_a_setting_that_is_wrong_is_refused_on_every_rank(tmp_path):
    with pytest.raises(ValueError, match="console_format is 'pretty'"):
        RunLog(tmp_path, console_format="pretty")
    with pytest.raises(TypeError, match="no_such_setting"):
        RunLog(tmp_path, no_such_setting=1)
    with pytest.raises(ValueError, match="RunLog got batch_size=-4: give a number of at least 1"):
        RunLog(tmp_path, batch_size=-4)
    with pytest.raises(ValueError, match="RunLog got seq_length=0"):
        RunLog(tmp_path, seq_length=0)


def test_counts_below_0_are_refused_and_count_nothing(tmp_path):
    with RunLog(tmp_path, batch_size=4, seq_length=10, log_every=1) as log:
        with pytest.raises(ValueError, match="log_step got samples=-8: give those since"):
            log.log_step(1.0, samples=-8)
        with pytest.raises(ValueError, match="log_step got tokens=-1"):
            log.log_step(1.0, tokens=-1)
        log.log_step(1.0, samples=0)
    assert (log.train_state.step, log.train_state.consumed_train_samples) == (1, 0)
    assert [line["step"] for line in lines_of(tmp_path)] == [1]


def test_a_log_that_is_closed_says_once_that_it_no_longer_writes(tmp_path, caplog):
    with RunLog(tmp_path, log_every=1) as log:
        log.log_step({"loss": 1.0})
    log.close()
    assert not caplog.messages
    for _ in range(2):
        log.log_step({"loss": 2.0})
        log.log_metrics({"accuracy": 0.5})
    assert [line["loss"] for line in lines_of(tmp_path)] == [1.0]
    assert caplog.messages == ["the log is closed: further metrics go to the console only"]


def test_a_number_that_no_float_can_hold_is_called_too_large(tmp_path, caplog):
    with RunLog(tmp_path, log_every=1) as log:
        log.log_step({"loss": 1.0}, huge=10**400)
    assert caplog.messages == [
        "'huge' is an int too large for a float and is not logged; give one number"
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_colours_and_the_line_keeps_above_a_bar(tmp_path, monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with tqdm.tqdm(total=2, file=terminal) as bar, RunLog(tmp_path, log_every=1) as log:
        log.log_step({"loss": float("nan")})
        bar.update()
    text = terminal.getvalue()
    assert re.search(r"\r +\r \033\[2m\[", text), repr(text)  # the bar is wiped first
    assert "loss: \033[31mNAN\033[0m |" in text


def test_a_file_of_ones_own_is_not_needed(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with GlobalState(extra_sinks=[sink]) as state:
        state.log_step({"loss": 1.0})
    assert len(lines_of(tmp_path)) == 1


def test_the_users_settings_and_the_batch_of_all_ranks_are_in_the_config_file(tmp_path):
    settings = {"depth": 3, "optimizer": {"lr": 1e-4}, "api_key": "sk-abcdefgh12345"}
    with RunLog(tmp_path, batch_size=8, log_every=1, config=settings) as log:
        log.log_step({"loss": torch.tensor(1.0)})
    written = json.loads((tmp_path / "config.json").read_text())
    expected = {"depth": "3", "optimizer.lr": "0.0001", "api_key": "***"}
    assert {name: written[f"model.{name}"] for name in expected} == expected
    assert written["train.global_batch_size"] == "8"
