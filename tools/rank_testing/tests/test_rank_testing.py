"""The results of run_ranks, and the arguments that it refuses."""

import functools
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


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    tensor *= 2
    return tensor


PENDING: list[Any] = []


def late_receiver() -> int:
    """Rank 0 returns with its data still on the way. Rank 1 fetches it later."""
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


def test_arguments_and_results_travel_as_copies() -> None:
    results = run_ranks(scaled_sum, 3, 10, factor=2)
    assert [int(result) for result in results] == [66, 66, 66]
    assert run_ranks(moved, 2, Point(1, 5)) == [Point(1, 5), Point(2, 5)]
    tensor = torch.ones(3)
    results = run_ranks(doubled, 2, tensor, init=None)
    assert tensor.tolist() == [1, 1, 1]
    assert [result.tolist() for result in results] == [[2, 2, 2], [2, 2, 2]]


def test_a_rank_that_returned_stays_until_its_data_has_arrived() -> None:
    assert run_ranks(late_receiver, 2) == [7, 7]


def test_success_prints_nothing_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(dist.get_rank, 1)  # the server's folder stays as long as it runs
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run_ranks(warn_and_print, 1, str(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
    assert list(folder.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_sizes_and_durations_that_are_none_are_refused() -> None:
    for world_size in (0, -1, True, 2.0, "2"):
        with pytest.raises(ValueError, match="world_size is the number of ranks"):
            run_ranks(rank_and_size, world_size)  # type: ignore[arg-type]
    for timeout_s in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s is a positive number of seconds"):
            run_ranks(rank_and_size, 2, timeout_s=timeout_s)


def test_functions_and_arguments_that_no_rank_could_receive_are_refused() -> None:
    def local() -> None:
        """Never run."""

    methods = (Methods.static, Methods().method)
    for fn in (lambda: None, local, *methods, functools.partial(rank_and_size), Point):
        with pytest.raises(TypeError, match="top level of the test file"):
            run_ranks(fn, 2)
    with pytest.raises(TypeError, match="have to be picklable"):
        run_ranks(doubled, 2, threading.Lock())
    with pytest.raises(RankFailure, match=r"RuntimeError: .*a rank cannot start ranks"):
        run_ranks(nested, 1)
