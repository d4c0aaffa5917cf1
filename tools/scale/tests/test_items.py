"""The items at a small size, the fit of their growth, and the page made of the results."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from results import RECORDS
from scale import processes
from scale.__main__ import main
from scale.items import ITEMS
from scale.meter import Cost, Meter, fit_exponent, measure
from scale.record import Result, find_miss, page, read_results, table


@pytest.mark.parametrize("name", sorted(ITEMS.keys() - {processes.REAL}))
def test_an_item_measures_work_with_a_right_result(name: str) -> None:
    costs = measure(ITEMS[name], [1024])
    assert {cost.ranks for cost in costs} == {1024}
    assert all(cost.seconds > 0 and cost.peak_bytes >= 0 for cost in costs)


def test_real_ranks_leave_nothing_behind_and_every_phase_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "CYCLES", 2)
    costs = measure(processes.real_ranks, [8], forks=False)
    assert len(costs) == 7  # phases
    assert all(cost.seconds > 0 for cost in costs)


def hold_memory(meter: Meter) -> None:
    with meter.role("busiest"):
        # Memory that the process had not, not even free.
        mmap.mmap(-1, meter.ranks << 22).write(bytes(meter.ranks << 22))
        meter.sent_bytes = 7


def test_the_memory_is_that_of_one_role_in_a_separate_process() -> None:
    large, small = measure(hold_memory, [32, 1])
    assert large.peak_bytes > 100 << 20  # of the 128 MiB that it maps
    # Pages of torch's libraries count too: how many depends on the machine.
    assert small.peak_bytes < large.peak_bytes / 2
    assert large[1::3] == ("busiest", 7)


def test_the_growth_is_fitted_over_the_last_four_sizes() -> None:
    sizes = [1, 1024, 4096, 16384, 65536]
    costs = [Cost(ranks, "each", 1e-9 * ranks**1.5, 0, 0) for ranks in sizes]
    costs[0] = costs[0]._replace(seconds=100.0)
    assert fit_exponent(costs) == pytest.approx(1.5)
    assert find_miss("from-sizes", costs) == "growth"
    flat = [Cost(ranks, "busiest, plan", 12.0, 3 << 30, 0) for ranks in sizes]
    assert find_miss("save-plan", flat) == "10 s, memory"
    # 1e-9 * 2 ** (20 * 1.5)
    assert table(Result("from-sizes", "", "", {}, costs))[1][0][-3:] == ["growth", "1.07 s", ""]


def test_a_run_keeps_its_results_and_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "scale.jsonl"
    main(["--items", "fsdp-index", "--ranks", "1024", "2048", "--record", str(path)])
    assert [cost.ranks for cost in read_results(path)["fsdp-index"].costs] == [1024, 2048]
    assert "| role | 1,024 | 2,048 | p | memory |" in path.with_suffix(".md").read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["--ranks", "1000"])


def test_the_page_of_the_repository_is_made_of_its_results() -> None:
    results = read_results(RECORDS / "scale.jsonl")
    assert set(results) <= set(ITEMS)
    assert (RECORDS / "scale.md").read_text() == page(results)
