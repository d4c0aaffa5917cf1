"""A few combinations of the main job's dimensions against float64, and what makes a row red."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from layouts import comparison
from layouts.cell import Result
from layouts.combinations import combinations, name_of, others
from layouts.comparison import compare, write_text
from layouts.table import Reference, Row, markdown, take_load, take_steps
from pretrain.cli.checks import check
from pretrain.settings import Settings

NAMES = [
    "tp2-cp1-dp1 sp packed",
    "tp1-cp2-dp1 fsdp recompute packed",
    "tp1-cp1-dp2 fsdp bf16",
    "tp1-cp1-dp2 bf16",
]


@pytest.mark.slow
def test_a_sample_of_the_table_is_green(tmp_path: Path) -> None:
    data = write_text(tmp_path)
    every = {name_of(one): one for one in combinations(2, data)}
    chosen = [every[name] for name in NAMES]
    rows = list(compare(chosen, chosen, tmp_path))
    assert [row.name for row in rows] == NAMES
    assert [row.problems for row in rows] == [[], [], [], []]
    assert [(row.loaded, row.to_load) for row in rows] == [(1, 1)] * 4
    assert all(0 < row.loss < 2e-6 and 0 < row.gradient < 2e-6 for row in rows[:2])
    assert all(row.loss > 1e-6 for row in rows[2:])  # bf16


def test_every_valid_combination_comes_once() -> None:
    for ranks, at_least in ((1, 8), (2, 40), (8, 200)):
        found = list(combinations(ranks, "text"))
        names = [name_of(one) for one in found]
        assert len(names) == len(set(names)) >= at_least
        for settings in found:
            check(settings, ranks)
    every = [one for ranks in (1, 2, 4, 8) for one in combinations(ranks, "text")]
    for settings in every[::37]:
        chosen = others(settings, every)
        assert [one.world_size for one in chosen][:4] == [1, 2, 4, 8]
        assert settings not in chosen
        assert {(one.packed, one.bf16) for one in chosen} == {(settings.packed, settings.bf16)}


@pytest.fixture
def judged() -> tuple[Row, Reference, Result]:
    """A row without results, a reference, and a result that equals it."""
    reference = Reference([5.0] * 22, [1.0] * 22, {"a": 2.0, "b": 1.0})
    return Row("x", 2, 1e-5), reference, Result(1, [5.0] * 20, [1.0] * 20, {"a": 2.0, "b": 1.0})


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
    take_steps(row, dataclasses.replace(result, **change), reference)
    assert row.is_green == (said == "ok")
    assert said in markdown([row])[-1]


def test_a_load_that_goes_on_elsewhere_makes_a_row_red(
    judged: tuple[Row, Reference, Result],
) -> None:
    row, reference, _ = judged
    row.to_load = 2
    take_load(row, Result(21, [5.0, 5.0], [1.0, 1.0]), reference, "tp2")
    take_load(row, Result(21, [5.0, 5.1], [1.0, 1.0]), reference, "cp2")
    assert (row.loaded, row.is_green) == (1, False)
    assert "as cp2: goes on 2.0e-02 off" in markdown([row])[-1]


def fail_in_the_second(tasks: list[comparison.Task]) -> None:
    """Write a result for each task but one, which fails."""
    for task in tasks:
        if task.run_dir == "second":
            raise ValueError("broken")
        Path(task.result).write_text('{"first": 1}')


def test_a_combination_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "do_tasks", fail_in_the_second)
    tasks = [
        comparison.Task(Settings(dp=1), name, False, str(tmp_path / name))
        for name in ("first", "second", "third")
    ]
    assert [result.error for result in comparison._results(tasks)] == ["", "broken", ""]
