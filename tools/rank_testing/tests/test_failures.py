"""The report about ranks that raise, hang, die or return something that cannot be sent."""

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rank_testing import RankFailure, RankReport, launch, run_ranks, watch
from rank_testing.report import make_failure
from rank_testing.tests.living import is_living, wait_until

MARGIN_S = 120.0  # well before the 180 s that ranks have, and enough for a busy machine
HANG_S = 4.0


@pytest.fixture(autouse=True, scope="module")
def _started_server() -> None:
    """Start the fork server, so no test's time includes it."""
    run_ranks(dist.get_rank, 1)


def fail_with(function: Callable[..., Any], size: int, *args: Any, **kwargs: Any) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, size, *args, **kwargs)
    return caught.value


def raise_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planted in {dist.get_rank()}")
    dist.all_reduce(torch.ones(1))


def compare(expected: int) -> None:
    size = dist.get_world_size()
    assert size == expected


def die_on(rank: int, signal_number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal_number)
    dist.all_reduce(torch.ones(1))


def leave(exit_code: int) -> None:
    os._exit(exit_code)


def leave_by_exit() -> None:
    sys.exit(3)


def return_a_lock(rank: int) -> Any:
    return threading.Lock() if dist.get_rank() == rank else 1


def skip_a_collective(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))


def wrap_a_lost_connection() -> None:
    if dist.get_rank() == 2:
        raise ValueError("first")
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise AssertionError("a wrapper that came later") from error


R, C, D = "raised", "connection", "died"


@pytest.mark.parametrize(
    ("function", "args", "first_line", "kinds", "traceback"),
    [
        (raise_on, ([1],), "rank 1 of 3 raised ValueError: planted in 1, in .*test_failures.py::r",
         {1: R, 0: C, 2: C}, 'raise ValueError(f"planted in'),
        (raise_on, ([0, 1],), "raised ValueError: planted in", {0: R, 1: R}, "in raise_on"),
        (compare, (3,), "raised AssertionError: assert 2 == 3", {0: R, 1: R}, "in compare"),
        (die_on, (1, signal.SIGKILL), "rank 1 of 2 died: killed by SIGKILL", {1: D, 0: C}, ""),
        (die_on, (1, signal.SIGSEGV), "1 of 2 died: killed by SIGSEGV", {1: D, 0: C}, "in die_on"),
        (leave, (7,), "died: exit code 7 before a result", {0: D}, ""),
        (leave_by_exit, (), "raised SystemExit: 3", {0: R}, "sys.exit(3)"),
        (return_a_lock, (1,), r"rank 1 of 2 raised TypeError: the return value \(lock\)", {1: R},
         "pickle"),
        (wrap_a_lost_connection, (), "rank 2 of 3 raised ValueError: first", {2: R, 0: C, 1: C},
         "ValueError: first"),
        (skip_a_collective, (1,), "rank 0 of 2 lost a connection", {0: C}, "in all_reduce"),
    ],
)  # fmt: skip
def test_the_culprit_comes_before_its_victims(
    function: Callable[..., None],
    args: tuple[Any, ...],
    first_line: str,
    kinds: dict[int, str],
    traceback: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_LINGER_S", 1.0)
    size = int(found[1]) if (found := re.search(r"of (\d)", first_line)) else len(kinds)
    started_at = time.monotonic()
    failure = fail_with(function, size, *args)
    assert time.monotonic() - started_at < MARGIN_S
    assert re.search(first_line, str(failure).splitlines()[0])
    assert {report.rank: report.kind for report in failure.ranks} == kinds
    assert failure.ranks[0].kind == next(iter(kinds.values()))
    assert traceback in failure.ranks[0].traceback
    assert ", in _call" not in str(failure)  # of the harness
    returned = sorted(set(range(size)) - set(kinds))
    assert (f"ranks that returned: {returned[0] if returned else ''}" in str(failure)) == bool(
        returned
    )
    assert ("left out a collective" in str(failure)) == (function is skip_a_collective)
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.ranks) == (str(failure), failure.ranks)


def announce(folder: str) -> None:
    Path(folder, os.environ["RANK"]).touch()


def wait_for(folder: str, *ranks: int) -> None:
    """Wait for ranks to arrive, which takes long on a busy machine."""
    assert wait_until(lambda: all(Path(folder, str(rank)).exists() for rank in ranks), MARGIN_S)


@pytest.fixture
def hang_from_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Start the time limit of the ranks when they are at the place where they hang."""
    watch_ranks = launch.watch

    def from_arrival(world_size: int) -> str:
        def watch_later(ranks: list[watch.Rank], deadline: float) -> None:
            wait_for(str(tmp_path), *range(world_size))
            watch_ranks(ranks, time.monotonic() + HANG_S)

        monkeypatch.setattr(launch, "watch", watch_later)
        return str(tmp_path)

    return from_arrival


def sleep_on(rank: int, folder: str) -> None:
    announce(folder)
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def test_a_hung_rank_is_named_with_the_stacks_of_all(
    hang_from_arrival: Callable[[int], str],
) -> None:
    started_at = time.monotonic()
    failure = fail_with(sleep_on, 2, 1, hang_from_arrival(2))
    assert HANG_S <= time.monotonic() - started_at < HANG_S + MARGIN_S
    named = re.match(r"rank 1 of 2 hung: no end after (\d+\.\d) s", str(failure))
    assert named
    assert HANG_S <= float(named[1]) < HANG_S + MARGIN_S
    culprit, victim = failure.ranks
    assert (culprit.rank, culprit.kind, victim.rank, victim.kind) == (1, "hung", 0, "hung")
    assert "in sleep_on" in culprit.traceback
    assert "all_reduce" not in culprit.traceback
    assert "in all_reduce" in victim.traceback
    assert "rank_testing/child.py" not in str(failure)


def hold_the_interpreter(folder: str) -> None:
    """Add up forever in C code that lets no other Python thread run."""
    announce(folder)
    sum(itertools.repeat(0))


def test_a_rank_that_holds_the_interpreter_lock_still_writes_its_stack(
    hang_from_arrival: Callable[[int], str],
) -> None:
    failure = fail_with(hold_the_interpreter, 1, hang_from_arrival(1), init=None)
    assert failure.ranks[0].kind == "hung"
    assert "in hold_the_interpreter" in failure.ranks[0].traceback


def raise_while_others_sleep(folder: str) -> None:
    if dist.get_rank() == 0:
        wait_for(folder, 1)
        raise ValueError("planted")
    announce(folder)
    while True:
        time.sleep(1)


def test_ranks_that_continue_after_a_failure_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("watch", "report"):
        monkeypatch.setattr(f"rank_testing.{module}.GRACE_S", 4.0)
    started_at = time.monotonic()
    failure = fail_with(raise_while_others_sleep, 2, str(tmp_path))
    assert 4 <= time.monotonic() - started_at < MARGIN_S
    assert [(report.rank, report.kind) for report in failure.ranks] == [(0, "raised"), (1, "hung")]
    assert failure.ranks[1].message == "still running 4 s after the first failure"
    assert "in raise_while_others_sleep" in failure.ranks[1].traceback


def print_and_raise() -> None:
    print("x" * 100_000 + "the end" if dist.get_rank() else "on standard output")
    print("on standard error", file=sys.stderr)
    os.write(1, b"from below Python\n")
    warnings.warn("old name", DeprecationWarning, stacklevel=1)
    if dist.get_rank() == 1:
        raise ValueError("planted")


def test_the_output_of_all_ranks_is_shown_up_to_a_limit() -> None:
    failure = fail_with(print_and_raise, 2)
    (report,) = failure.ranks
    for text in ("on standard error", "from below Python", "DeprecationWarning: old name"):
        assert text in report.output
        assert str(failure).count(text) == 2
    assert "on standard output" in str(failure)
    assert "xthe end" in str(failure)
    assert "characters left out" in str(failure)
    assert len(str(failure)) < 10_000 < 100_000 < len(report.output)


def start_a_program_and_raise(folder: str) -> None:
    program = subprocess.Popen(["sleep", "600"])
    Path(folder, "program").write_text(str(program.pid))
    raise ValueError("planted")


def test_programs_started_by_a_rank_end_with_it(tmp_path: Path) -> None:
    fail_with(start_a_program_and_raise, 1, str(tmp_path), init=None)
    program = int((tmp_path / "program").read_text())
    assert wait_until(lambda: not is_living(program), MARGIN_S)


def test_accelerator_ranks_name_the_lack_of_devices() -> None:
    count = torch.accelerator.device_count()
    failure = fail_with(compare, count + 1, count + 1, init="cuda:nccl", timeout_s=300)
    assert f"needs {count + 1} accelerators, this machine has {count}" in str(failure)


def test_the_smallest_place_comes_first_then_the_earliest_then_the_lowest_rank() -> None:
    ends = [
        (0, C, 0.1, 3), (1, R, 0.3, 0), (2, D, 0.2, 0), (4, D, 0.2, 0), (3, "hung", 0.1, 1),
    ]  # fmt: skip
    reports = [
        RankReport(rank, kind, "SomeError", f"message {rank}", "", "", elapsed_s, place)
        for rank, kind, elapsed_s, place in ends
    ]
    failure = make_failure(reports, {}, 5, "test_x.py::f")
    assert [entry.rank for entry in failure.ranks] == [2, 4, 1, 3, 0]
    assert str(failure).splitlines()[0] == "rank 2 of 5 died: message 2, in test_x.py::f"
