"""Runs as tables and charts, from files of real sinks."""

import math
import os
import re
import signal
import subprocess

import pytest
import torch

from mcore.observe import JsonlSink, Outlier, RunLog
from mcore.observe.__main__ import main
from mcore.observe.runs import compare, log_slow_ranks
from mcore.observe.runs.run_page import page_data
from mcore.observe.runs.tables import Run
from mcore.observe.terminal import sparkline
from rank_testing.scripts import Script

EVIL = "<b>\x1b[31m\u2028</script>"


@pytest.fixture
def folders(tmp_path):
    for name, factor in (("first", 1.0), ("second", 0.5)):
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        for step in range(1, 101):
            loss = math.nan if step == 50 else factor * 100 / step
            sink.log({"lm loss": loss, "<odd> & name": factor}, step)
        if name == "first":
            sink.log({"only here": 1.0, "lm loss": 7.0}, 100)
        sink.close()
    return tmp_path / "first", tmp_path / "second"


def test_a_table_has_the_ends_and_extremes_of_every_metric(folders, capsys):
    assert main(["show", str(folders[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "steps", "first", "last", "least", "largest", "NaN"]
    assert re.split(r"  +", lines[1])[:7] == ["lm loss", "1-100", "100", "7", "1.01", "100", "1"]
    assert re.split(r"  +", lines[1])[7][0] == "█"
    assert lines[3].startswith("only here")


def test_two_runs_are_compared_at_the_last_step_of_both(folders, capsys):
    assert main(["compare", *map(str, folders), "--metric", "lm loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", lines[1])[:5] == [
        "lm loss",
        "100",
        "7 (1 NaN)",
        "0.5 (1 NaN)",
        "-92.9%",
    ]
    assert len(lines) == 2
    again = [str(folders[0]), *map(str, folders)]
    assert main(["compare", *again, "--metric", "lm loss"]) == 0
    columns = re.split(r"  +", capsys.readouterr().out.splitlines()[1])
    lost = [f"{value} (1 NaN)" for value in ("7", "7", "0.5")]
    assert columns[:7] == ["lm loss", "100", *lost, "+0.0%", "-92.9%"]
    assert main(["show", str(folders[0]), "--html", str(folders[0] / "page.html")]) == 0
    assert (folders[0] / "page.html").read_text().startswith("<!doctype html>")


def test_who_was_slow_is_kept_by_report_and_a_run_that_goes_back_forgets(folders, caplog):
    run = folders[0]
    assert Run.read(run).slow == {}
    one = Outlier("forward", 1, "node1", 40.0, 10.0, 9.0, 0.25, "cuda:1")
    hot = Outlier("temp_c", 3, EVIL, 90.0, math.inf, 5.0, math.nan, "")
    log_slow_ranks(run, 10, [one])
    log_slow_ranks(run, 20, [])
    log_slow_ranks(run, 30, [hot, one])
    found = Run.read(run).slow
    assert list(found) == [10, 20, 30]
    assert (found[10], found[20]) == ((one,), ())
    first, second = found[30]
    assert (first.host, first.value, second) == (EVIL, 90.0, one)
    assert math.isnan(first.median)
    assert math.isnan(first.score)
    with (run / "slow_ranks.jsonl").open("a") as file:
        file.write('{"step": 40, "slow": [{"rank": 7}, 3]}\n[]\n{"step": "x"}\n{"step": 50, "sl')
    log_slow_ranks(run, 60, [one] * 1000)
    found = Run.read(run).slow
    assert {step: len(slow) for step, slow in found.items()} == {10: 1, 20: 0, 30: 2, 40: 1, 60: 64}
    log_slow_ranks(run, 20, [hot])  # from a checkpoint at step 15
    assert {step: len(slow) for step, slow in Run.read(run).slow.items()} == {10: 1, 20: 1}
    (run / "slow_ranks.jsonl").unlink()
    (run / "slow_ranks.jsonl").mkdir()
    for step in (30, 40):
        log_slow_ranks(run, step, [one])
    assert Run.read(run).slow == {}
    assert len([r for r in caplog.records if "slow_ranks.jsonl" in r.getMessage()]) == 1


def test_values_as_far_apart_as_floats_can_be():
    assert sparkline([-1.7e308, 0.0, 1.7e308], bars="01234567") == "047"


def test_a_picture(folders, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    assert main(["show", str(folders[0]), "--png", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nothing"], "nothing has no metrics"),
        (["show", "{first}", "--metric", "x"], "first has no metric 'x': it has ['<odd> & name'"),
        (["replay", "nothing"], "there is no folder nothing"),
    ],
)
def test_what_is_not_there_is_an_error_that_says_so(folders, capsys, words, message):
    assert main([word.format(first=folders[0]) for word in words]) == 1
    assert message in capsys.readouterr().err


def test_a_pipe_in_a_folder_does_not_block(tmp_path, capsys):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert main(["show", str(tmp_path)]) == 1
    assert "has no metrics: there is no" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").unlink()
    JsonlSink(tmp_path / "metrics.jsonl").log({"loss": 2.5}, 1)
    for name in ("config.json", "slow_ranks.jsonl"):
        os.mkfifo(tmp_path / name)
    assert Run.read(tmp_path).curves == {"loss": {1: 2.5}}
    os.mkfifo(tmp_path / "given")
    with subprocess.Popen(["cp", str(tmp_path / "metrics.jsonl"), str(tmp_path / "given")]):
        assert Run.read(tmp_path / "given").curves == {"loss": {1: 2.5}}


def test_sparklines():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▅▅"
    assert sparkline([0.0, math.nan, 1.0]) == "▁x█"
    assert sparkline([]) == ""
    assert len(sparkline(range(1000))) == 32


def test_a_damaged_file_shows_what_is_whole(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log({"loss": 2.0}, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo\n\x00\xff\n[1]\n{"loss": 9.0}\n{"step": "x", "loss": 9.0}\n')
        file.write(b'{"step": 3, "loss": "abc", "other": [1], "good": 1}\n')
    sink.log({"loss": 4.0}, 4)
    sink.close()
    assert Run.read(tmp_path).curves == {"loss": {1: 2.0, 4: 4.0}, "good": {3: 1.0}}
    again = JsonlSink(tmp_path / "metrics.jsonl", resume_step=3)
    again.log({"loss": 5.0}, 4)
    again.close()
    assert Run.read(tmp_path).curves["loss"] == {1: 2.0, 4: 5.0}


def test_a_run_without_metrics_and_runs_without_common_ones_say_so(tmp_path, capsys):
    for name, metric in (("empty", None), ("one", "a"), ("two", "b")):
        (tmp_path / name).mkdir()
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        if metric is not None:
            sink.log({metric: 1.0}, 1)
        sink.close()
    assert main(["show", str(tmp_path / "empty")]) == 1
    assert "empty has no metrics yet" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert "one and two have no metric at the same step" in capsys.readouterr().err


def test_two_runs_in_one_folder_are_one_warning_and_both_are_written(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    first, second = JsonlSink(path), JsonlSink(path)
    for step in (1, 2):
        first.log({"a": 1.0}, step)
        second.log({"b": 2.0}, step)
    assert [r.getMessage() for r in caplog.records] == [
        f"another run writes {path} too: give each a separate folder"
    ]
    assert Run.read(path).curves == {"a": {1: 1.0, 2: 1.0}, "b": {1: 2.0, 2: 2.0}}
    first.close()
    second.close()
    JsonlSink(path).log({"a": 3.0}, 3)  # a run that goes on
    assert len(caplog.records) == 1


HOSTILE = "loss\x1b]0;title\x07\x1b[2J\nforged 1-2 9 9\u202e\r\x9b1m"


def test_names_of_a_run_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    for number in (1, 2):
        folder = tmp_path / f"run{number}\x1b[31m"
        folder.mkdir()
        sink = JsonlSink(folder / "metrics.jsonl")
        for step in (1, 2):
            sink.log({HOSTILE: 1.0, "n" * 500: 2.0}, step)
        sink.close()
    runs = [str(path) for path in sorted(tmp_path.iterdir())]
    assert main(["show", runs[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # no forged row
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 150
    assert main(["compare", *runs]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert main(["show", runs[0], "--metric", "none\x1b[2J"]) == 1
    assert main(["show", f"{tmp_path}/\x1b[2J"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.isprintable() for line in errors)


def test_nan_is_the_last_value_and_is_counted(tmp_path, capsys):
    for name, losses in (("lost", [2.5, math.nan, math.nan]), ("gone", [math.nan] * 51)):
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        for step, loss in enumerate(losses, 1):
            sink.log({"loss": loss, "lr": 1.0}, step)
        sink.close()
    assert main(["show", str(tmp_path / "lost")]) == 0
    head, loss, rate = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["metric", "steps", "first", "last", "least", "largest", "NaN"]
    assert loss[:7] == ["loss", "1-3", "2.5", "nan", "2.5", "2.5", "2"]
    assert rate[6] == "0"
    assert main(["compare", str(tmp_path / "lost"), str(tmp_path / "gone")]) == 0
    assert "nan (2 NaN)  nan (51 NaN)" in capsys.readouterr().out
    lost, gone = (Run.read(tmp_path / name) for name in ("lost", "gone"))
    data = page_data([lost, gone])
    (chart,) = (one for one in data["charts"] if one["name"] == "loss")
    assert [curve["nan"] for curve in chart["curves"]] == [2, 51]
    assert chart["curves"][0]["y"] == [2.5, None, None]
    figures = [run["figures"][0] for run in data["runs"]]
    assert figures[0] == ("loss", None, "last; least 2.5; NaN at 2 of 3 steps")
    assert figures[1] == ("loss", None, "last; least nan; NaN at 51 of 51 steps")


def test_a_large_loss_is_not_infinite(tmp_path, capsys):
    with RunLog(tmp_path, log_every=2) as log:
        for loss in (1e300, torch.tensor(3e300, dtype=torch.float64)):
            log.log_step(loss)
    assert " loss: 2.000000E+300 |" in capsys.readouterr().out
    assert Run.read(tmp_path).curves["loss"] == {2: 3e300}


def test_runs_are_compared_by_a_pattern(tmp_path, capsys):
    for number in (1, 2, 3):
        JsonlSink(tmp_path / f"lr-{number}" / "metrics.jsonl").log({"loss": float(number)}, 1)
    JsonlSink(tmp_path / "other" / "metrics.jsonl").log({"loss": 9.0}, 1)
    assert main(["compare", str(tmp_path / "lr-*")]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["metric", "step", "lr-1", "lr-2", "lr-3"]
    assert row.split()[:7] == ["loss", "1", "1", "2", "3", "+100.0%", "+200.0%"]
    assert main(["compare", str(tmp_path / "oth*")]) == 1
    assert "is one run: give two or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (math.nan, 1.0, "-"),
        (1.0, math.nan, "-"),
        (0.0, math.nan, "-"),
        (math.inf, math.inf, "-"),
        (-1e308, 1e308, "-"),  # the difference is no float
        (-2.0, -1.0, "+50.0%"),
        (0.0, -0.25, "-0.25"),
    ],
)
def test_a_change_that_is_no_number_is_a_dash(before, after, change):
    _, row = compare([Run("a", {"loss": {1: before}}), Run("b", {"loss": {1: after}})])
    columns = re.split(r"  +", row)
    assert columns[:2] + columns[4:5] == ["loss", "1", change]


FOLLOW = """
import signal, sys
from mcore.observe.__main__ import main
# A shell lets the commands that it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["show", sys.argv[1], "--follow"]))
"""


@pytest.mark.xdist_group("waits")
def test_show_follows_a_run_that_starts_later_and_anew_until_ctrl_c(tmp_path):
    run = tmp_path / "run"
    looking = Script(FOLLOW, str(run), env={**os.environ, "PYTHONUNBUFFERED": "1"})
    looking.wait_until_printed("waiting: ", 300)
    sink = JsonlSink(run / "metrics.jsonl")
    looking.wait_until_printed("run has no metrics yet", 300)
    sink.log({"loss": 4.0}, 1)
    # Numbers with a blank before: those of the folder's name are printed too.
    looking.wait_until_printed(" 1-1", 300)
    sink.log({"loss": 0.125}, 2)
    looking.wait_until_printed(" 0.125", 300)
    sink.path.rename(run / "metrics.1.jsonl")
    looking.wait_until_printed("there is no", 300)
    anew = JsonlSink(run / "metrics.jsonl")
    anew.log({"loss": 32.0}, 1)
    looking.wait_until_printed(" 32", 300)
    os.truncate(anew.path, 0)
    anew.log({"loss": 16.0}, 7)
    looking.wait_until_printed(" 7-7", 300)
    os.kill(looking.pid, signal.SIGINT)
    done = looking.wait(300)
    assert done.returncode == 128 + signal.SIGINT
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line[1:4] for line in lines if line[:1] == ["loss"]]
    ends = [["1-1", "4", "4"], ["1-2", "4", "0.125"], ["1-1", "32", "32"], ["7-7", "16", "16"]]
    assert rows == ends


def test_metrics_are_chosen_by_name_and_pattern(tmp_path, capsys):
    for name in ("a", "b"):
        sink = JsonlSink(tmp_path / name / "metrics.jsonl")
        sink.log({"lm loss": 2.0, "lm [1]": 3.0, "lr": 0.5, f"only {name}": 1.0}, 1)
    runs = [str(tmp_path / name) for name in ("a", "b")]

    def metrics(*arguments):
        assert main(list(arguments)) == 0
        return [re.split("  +", line)[0] for line in capsys.readouterr().out.splitlines()[1:]]

    assert metrics("compare", *runs, "--metric", "lm*") == ["lm loss", "lm [1]"]
    assert metrics("compare", *runs, "--metric", "lm [1]", "--metric", "l?") == ["lm [1]", "lr"]
    assert metrics("compare", *runs, "--metric", "*") == ["lm loss", "lm [1]", "lr"]
    assert metrics("show", runs[0], "--metric", "*l*") == ["lm loss", "lm [1]", "lr", "only a"]
    page = tmp_path / "page.html"
    assert main(["compare", *runs, "--metric", "lm*", "--html", str(page)]) == 0
    assert "lm [1]" in page.read_text()
    assert "only a" not in page.read_text()
    for command, given, lacks in (
        (
            ["compare", *runs],
            "x*",
            "a has no metric 'x*': it has ['lm [1]', 'lm loss', 'lr', 'only",
        ),
        (["compare", *runs], "only a", "b has no metric 'only a'"),
        (["show", runs[0]], "x*", "a has no metric 'x*'"),
    ):
        assert main([*command, "--metric", given]) == 1
        assert lacks in capsys.readouterr().err
