"""What run_ranks returns, and what it refuses."""

import functools
import math
import os
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rank_testing import RankFailure, run_ranks


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def scaled_sum(offset: int, *, factor: int) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total * factor


def moved(point: Point) -> Point:
    return Point(point.x + dist.get_rank(), point.y)


def big_tensor(megabytes: int) -> torch.Tensor:
    return torch.full((megabytes, 1 << 18), float(dist.get_rank()))


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    tensor *= 2
    return tensor


def group_exists() -> bool:
    return dist.is_initialized()


PENDING: list[Any] = []


def late_receiver() -> int:
    """Rank 0 returns with its data still on the way; rank 1 fetches it later."""
    data = torch.tensor([7])
    if dist.get_rank() == 0:
        PENDING.append((data, dist.isend(data, 1)))
        return 7
    time.sleep(0.5)
    data.zero_()
    dist.recv(data, 0)
    return int(data)


def nested() -> None:
    run_ranks(rank_and_size, 1)


def processes_of_this_rank() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def threads_of_torch() -> int:
    return torch.get_num_threads()


def warn_and_print(path: str) -> None:
    warnings.warn("old name", DeprecationWarning, stacklevel=1)
    print("printed")
    Path(path).touch()


class Methods:
    @staticmethod
    def static() -> None:
        """Never run."""

    def method(self) -> None:
        """Never run."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_in_the_order_of_ranks(world_size: int) -> None:
    results = run_ranks(rank_and_size, world_size)
    assert results == [(rank, world_size) for rank in range(world_size)]


def test_arguments_and_collectives_reach_every_rank() -> None:
    results = run_ranks(scaled_sum, 3, 10, factor=2)
    assert [int(result) for result in results] == [66, 66, 66]


def test_classes_of_the_test_file_travel_both_ways() -> None:
    assert run_ranks(moved, 2, Point(1, 5)) == [Point(1, 5), Point(2, 5)]


def test_large_results_of_all_ranks_come_back() -> None:
    results = run_ranks(big_tensor, 3, 24)
    for rank, result in enumerate(results):
        assert result.shape == (24, 1 << 18)
        assert bool((result == rank).all())


def test_arguments_and_results_are_copies() -> None:
    tensor = torch.ones(3)
    results = run_ranks(doubled, 2, tensor, init=None)
    assert tensor.tolist() == [1, 1, 1]
    assert [result.tolist() for result in results] == [[2, 2, 2], [2, 2, 2]]


def test_init_none_starts_ranks_without_a_group() -> None:
    assert run_ranks(group_exists, 2, init=None) == [False, False]
    assert run_ranks(group_exists, 2) == [True, True]


def test_functions_of_installed_modules_and_of_c_code_run() -> None:
    assert run_ranks(dist.get_rank, 2) == [0, 1]
    assert run_ranks(os.path.join, 1, "a", "b", init=None) == ["a/b"]
    assert run_ranks(math.sqrt, 1, 9.0, init=None) == [3.0]


def test_every_rank_is_a_process_of_its_own_for_each_call() -> None:
    calls = [run_ranks(processes_of_this_rank, 2, init=None) for _ in range(2)]
    pids = [pid for call in calls for pid, _ in call]
    parents = {parent for call in calls for _, parent in call}
    assert len({*pids, os.getpid()}) == 5
    assert len(parents) == 1
    assert os.getpid() not in parents


def test_a_rank_has_one_torch_thread() -> None:
    assert run_ranks(threads_of_torch, 2) == [1, 1]


def test_a_rank_that_returned_stays_until_its_data_has_arrived() -> None:
    assert run_ranks(late_receiver, 2) == [7, 7]


def test_calls_from_several_threads_do_not_mix() -> None:
    results: dict[int, list[torch.Tensor]] = {}

    def call(offset: int) -> None:
        results[offset] = run_ranks(scaled_sum, 2, offset, factor=1)

    threads = [threading.Thread(target=call, args=(offset,)) for offset in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sums = {offset: [int(value) for value in values] for offset, values in results.items()}
    assert sums == {0: [1, 1], 100: [201, 201], 200: [401, 401]}


def test_success_prints_nothing_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(dist.get_rank, 1)  # the server's own folder stays as long as it
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run_ranks(warn_and_print, 1, str(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
    assert list(folder.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2"])
def test_a_world_size_that_is_no_count_is_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size is the number of ranks"):
        run_ranks(rank_and_size, world_size)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s is a positive number of seconds"):
        run_ranks(rank_and_size, 2, timeout_s=timeout_s)


def test_functions_that_no_rank_could_find_are_refused() -> None:
    def local() -> None:
        """Never run."""

    refused: list[Any] = [
        lambda: None,
        local,
        Methods.static,
        Methods().method,
        functools.partial(rank_and_size),
        Point,
    ]
    for fn in refused:
        with pytest.raises(TypeError, match="top level of the test file"):
            run_ranks(fn, 2)


def test_arguments_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(TypeError, match="have to be picklable"):
        run_ranks(doubled, 2, threading.Lock())


def test_ranks_cannot_start_ranks() -> None:
    with pytest.raises(RankFailure, match="a rank cannot start ranks") as caught:
        run_ranks(nested, 1)
    assert caught.value.ranks[0].exception_type == "RuntimeError"
