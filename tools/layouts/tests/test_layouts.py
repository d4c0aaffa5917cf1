"""A few combinations of the main job against float64, and the reasons for a red row."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layouts import __main__ as command
from layouts import comparison
from layouts.cell import Result, limit_time
from layouts.combinations import (
    FIXED,
    choose_combinations,
    combinations,
    held_out,
    meetings,
    name_of,
    others,
)
from layouts.comparison import compare, write_text
from layouts.experts import PlainExperts, RoutingError
from layouts.table import Reference, Row, compare_load, compare_steps
from pretrain.cli.checks import check
from pretrain.settings import Settings

NAMES = [
    "tp2-cp1-dp1 ep1 sp packed", "tp1-cp2-dp1 ep2 fsdp recompute packed",
    "tp1-cp1-pp2-vpp2-dp1 ep1 packed", "tp1-cp1-dp2 fsdp bf16", "tp2-cp1-dp1 bf16",
]  # fmt: skip


@pytest.mark.slow
def test_a_sample_of_the_table_is_green(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    every = {name_of(one): one for one in combinations(2, data)}
    sample = [every[name] for name in NAMES]
    rows = list(compare(sample, sample, tmp_path, steps=6))
    assert [row.name for row in rows] == NAMES
    assert [row.problems for row in rows] == [[]] * len(NAMES)
    assert not list(compare(sample, sample, tmp_path, deadline=0.0))
    assert [(row.loaded, row.to_load) for row in rows] == [(1, 1), (1, 1), (2, 2), (1, 1), (1, 1)]
    for row in rows:
        most = 5e-3 if "bf16" in row.name else 2e-6
        assert most / 100 < max(row.loss, row.gradient) < most


def test_every_layout_is_run_and_any_two_values_meet() -> None:
    for ranks, at_least in ((1, 16), (2, 150), (8, 2000)):
        every = combinations(ranks, "text")
        run = choose_combinations(ranks, "text")
        for of in (every, run):
            names = [name_of(one) for one in of]
            assert len(names) == len(set(names))
        assert len(every) >= at_least
        assert set(run) <= set(every)
        for settings in every:
            check(settings, ranks)
        layouts = [{layout_of(one) for one in of} for of in (run, every)]
        assert layouts[0] == layouts[1]
        pairs = [set().union(*(meetings(one, 2) for one in of)) for of in (run, every)]
        assert pairs[0] == pairs[1]
        assert ranks > 2 or len(run) == len(every)


def test_the_parts_of_all_nights_are_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    every = [f"tp{number}" for number in range(40)]
    nights = [
        command.select_part(every, *command.parse_part(f"{night}/17")) for night in range(100, 117)
    ]
    assert sorted(name for night in nights for name in night) == sorted(every)
    for wrong in ("3", "3/0", "-1/17", "a/b"):
        with pytest.raises(SystemExit):
            command.main([f"--part={wrong}"])
        assert f"{wrong} is not like 3/17" in capsys.readouterr().err


def layout_of(settings: Settings) -> tuple[object, ...]:
    """The layout without its switches."""
    return settings.layout, settings.experts, settings.ep, settings.fsdp, settings.hsdp_outer


def test_checkpoints_are_loaded_on_every_number_of_ranks() -> None:
    every = [one for ranks in (1, 2, 4, 8) for one in combinations(ranks, "text")]
    kinds = held_out("text")
    assert len({name_of(one) for one in kinds} - {name_of(one) for one in every}) == 7
    for settings in [*every[::97], *kinds]:
        drawn = others(settings, every)
        if settings not in kinds:
            assert [one.world_size for one in drawn] == [1, 2, 4, 8]
        assert len({one.world_size for one in drawn}) >= 3
        assert settings not in drawn
        for name in (*FIXED, "num_layers", "seq_length", "topk", "clip_grad"):
            assert {getattr(one, name) for one in drawn} == {getattr(settings, name)}
        for one in drawn:
            check(one, one.world_size)


@pytest.fixture
def judged() -> tuple[Row, Reference, Result]:
    """A row without results, a reference, and a result that equals it."""
    reference = Reference([5.0] * 22, [1.0] * 22, {"a": 2.0, "b": 1.0})
    row = Row("x", 2, 2, 1e-5, "today", "a machine")
    return row, reference, Result(1, [5.0] * 20, [1.0] * 20, {"a": 2.0, "b": 1.0})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "ok"),
        ({"losses": [5.0] * 19 + [5.0001]}, "differs by more than 1e-05"),
        ({"losses": [5.0] * 19}, "differs"),
        ({"norms": [math.nan] * 20}, "differs"),
        ({"gradients": {"a": 2.0, "b": 1.0001}}, "differs"),
        ({"gradients": {"a": 2.0}}, "gradients of"),
        ({"error": "no such group"}, "no such group"),
    ],
)
def test_what_makes_a_row_red(
    change: dict[str, object], said: str, judged: tuple[Row, Reference, Result]
) -> None:
    row, reference, result = judged
    compare_steps(row, dataclasses.replace(result, **change), reference)
    assert row.is_green == (said == "ok")
    assert said in row.cells()[-1]


def test_a_load_that_goes_on_elsewhere_makes_a_row_red(
    judged: tuple[Row, Reference, Result],
) -> None:
    row, reference, _ = judged
    row.to_load = 2
    compare_load(row, Result(21, [5.0, 5.0], [1.0, 1.0]), reference, "tp2")
    compare_load(row, Result(21, [5.0, 5.1], [1.0, 1.0]), reference, "cp2")
    assert (row.loaded, row.is_green) == (1, False)
    assert "as cp2: continues 2.0e-02 off" in row.cells()[-1]


def route_by_float32(settings: Settings, moved: float) -> tuple[PlainExperts, torch.Tensor]:
    """A float64 model routed by its own choices, but for one token between two experts.

    The second of these is less likely by ``moved``. Returns the model and its output.
    """
    model = PlainExperts(settings).double()
    router = model.weights["layers/0/feed_forward/router/weight"]
    x = torch.randn(1, 4, settings.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        order = (x[0, 0] @ router.T).argsort(descending=True)
        at_the_bound = order[settings.topk - 1 : settings.topk + 1]
        missing = (x[0, 0] @ (router[at_the_bound[0]] - router[at_the_bound[1]])) - moved
        router[at_the_bound[1]] += missing * x[0, 0] / x[0, 0].square().sum()
        logits = (x @ router.T)[0]
        chosen = logits.topk(settings.topk).indices
        chosen[0, -1] = at_the_bound[1]
    model.step, model.routes = 1, {(1, 0): (logits.float().flip(0), chosen.flip(0))}
    return model, model._feed_forward("layers/0/feed_forward", x)


def test_only_ties_between_experts_are_taken_over() -> None:
    settings = Settings(experts=4, topk=2, hidden_size=32, num_layers=1)
    model, routed = route_by_float32(settings, moved=1e-5)
    assert model.ties == 1
    own = PlainExperts(settings).double()
    own.load_state_dict(model.state_dict())
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0)).double()
    apart = (own._feed_forward("layers/0/feed_forward", x) - routed).abs().amax(-1)[0]
    assert apart[0] > 1e-9
    assert apart[1:].max() == 0.0
    with pytest.raises(RoutingError, match=r"an expert was left that is 1\.0e-02 likelier"):
        route_by_float32(settings, moved=1e-2)


def fail_in_some(tasks: list[comparison.Task], limit_s: int) -> None:
    """Write a result for each task but one, which fails, and one, which hangs."""
    for task in tasks:
        with limit_time(1 if task.run_dir == "third" else limit_s):
            if task.run_dir == "second":
                raise ValueError("broken")
            if task.run_dir == "third":
                threading.Event().wait()
        Path(task.result).write_text('{"first": 1}')


def test_a_combination_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "do_tasks", fail_in_some)
    tasks = [
        comparison.Task(Settings(dp=1), name, False, str(tmp_path / name))
        for name in ("first", "second", "third", "fourth")
    ]
    errors = [result.error for result in comparison._run_tasks(tasks)]
    assert errors == ["", "broken", f"no end after {comparison._TASK_S} s", ""]
    printed = capsys.readouterr().err
    assert "ValueError: broken" in printed
    assert "in fail_in_some" in printed  # where it hung


def test_results_are_kept_and_what_is_green_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def compare_nothing(wanted: list[Settings], *_: object) -> Iterator[Row]:
        for one in wanted:
            ran.append(name_of(one))
            yield Row(name_of(one), one.world_size, 2, 1e-5, "later", "m", problems=["broken"])

    monkeypatch.setattr(command, "compare", compare_nothing)
    results, written = tmp_path / "results.jsonl", tmp_path / "table.md"
    green = Row("tp1-cp1-dp1", 1, 2, 1e-5, "today", "m")
    red = dataclasses.replace(green, name="tp1-cp1-dp1 bf16", problems=["far"])
    lines = [json.dumps(dataclasses.asdict(row)) for row in (red, green)]
    results.write_text("\n".join(lines) + '\n{"name": "tp2')
    options = ["--results", str(results), "--output", str(written), "--only", "tp1-cp1-dp1"]
    assert command.main(options) == 2
    assert "has 2 results. Continue them with --resume" in capsys.readouterr().err
    assert command.main([*options, "tp9", "--resume"]) == 2
    assert "there is no tp9" in capsys.readouterr().err
    assert command.main([*options, "--resume"]) == 0
    assert command.main([*options, "tp1-cp1-dp1 bf16", "--resume"]) == 1
    assert ran == ["tp1-cp1-dp1 bf16"]
    assert (
        "2 of 480 combinations have been run, 1 are green. They were run from later"
        in written.read_text()
    )
    page = written.read_text()
    assert "| 1 | fp32 | | 1/1 |" in page
    assert page.partition("## Failures")[2].count("\n| tp1-cp1-dp1") == 1
    assert json.loads(results.read_text().splitlines()[-1])["problems"] == ["broken"]
