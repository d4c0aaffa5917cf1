"""What RankFailure says of ranks that raise, hang, die or return what cannot be sent."""

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

from rank_testing import RankFailure, launch, run_ranks, watch

MARGIN_S = 120.0  # well before the 180 s that ranks have, and enough for a busy machine
HANG_S = 4.0


@pytest.fixture(autouse=True, scope="module")
def _started_server() -> None:
    """Start the fork server, so that no test's time includes it."""
    run_ranks(dist.get_rank, 1)


def raise_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planted in {dist.get_rank()}")
    dist.all_reduce(torch.ones(1))


def compare(expected: int) -> None:
    size = dist.get_world_size()
    assert size == expected


def arrived(folder: str) -> None:
    Path(folder, os.environ["RANK"]).touch()


def wait_for(folder: str, *ranks: int) -> None:
    """Wait until ranks have arrived, which a busy machine may keep from it for long."""
    deadline = time.monotonic() + MARGIN_S
    while not all(Path(folder, str(rank)).exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def hang_from_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Have the time that ranks have begin when they are where they hang."""
    watch_ranks = launch.watch

    def from_arrival(world_size: int) -> str:
        def watched(ranks: list[watch.Rank], deadline: float) -> None:
            wait_for(str(tmp_path), *range(world_size))
            watch_ranks(ranks, time.monotonic() + HANG_S)

        monkeypatch.setattr(launch, "watch", watched)
        return str(tmp_path)

    return from_arrival


def sleep_on(rank: int, folder: str) -> None:
    arrived(folder)
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def hold_the_interpreter(folder: str) -> None:
    """Add up for ever in C code that lets no other Python thread run."""
    arrived(folder)
    sum(itertools.repeat(0))


def die_on(rank: int, signal_number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal_number)
    dist.all_reduce(torch.ones(1))


def leave(exit_code: int) -> None:
    os._exit(exit_code)


def leave_by_exit() -> None:
    sys.exit(3)


def unpicklable_on(rank: int) -> Any:
    return threading.Lock() if dist.get_rank() == rank else 1


class OnlyInRanks:
    """Pickles in a rank, and refuses to be read in the test process."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return read_in_a_rank_only, ("value",)


def read_in_a_rank_only(value: str) -> str:
    if "RANK" not in os.environ:
        raise LookupError("not in a rank")
    return value


def unreadable() -> OnlyInRanks:
    return OnlyInRanks()


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


def raise_while_others_sleep(folder: str) -> None:
    if dist.get_rank() == 0:
        wait_for(folder, 1)
        raise ValueError("planted")
    arrived(folder)
    while True:
        time.sleep(1)


def print_and_raise() -> None:
    print("on standard output")
    print("on standard error", file=sys.stderr)
    os.write(1, b"from below Python\n")
    warnings.warn("old name", DeprecationWarning, stacklevel=1)
    if dist.get_rank() == 1:
        raise ValueError("planted")


def start_a_program_and_raise(folder: str) -> None:
    program = subprocess.Popen(["sleep", "600"])
    Path(folder, "program").write_text(str(program.pid))
    raise ValueError("planted")


def print_much() -> None:
    print("x" * 100_000 + "the end")
    raise ValueError("planted")


def failure_of(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fn, world_size, *args, **kwargs)
    return caught.value


def first_line(failure: RankFailure) -> str:
    return str(failure).splitlines()[0]


def test_a_raising_rank_is_named_before_its_victims() -> None:
    started_at = time.monotonic()
    failure = failure_of(raise_on, 3, [1])
    assert time.monotonic() - started_at < MARGIN_S
    assert first_line(failure).startswith("rank 1 of 3 raised ValueError: planted in 1, in ")
    assert first_line(failure).endswith("test_failures.py::raise_on")
    culprit, *victims = failure.ranks
    assert (culprit.rank, culprit.kind, culprit.exception_type) == (1, "raised", "ValueError")
    assert culprit.message == "planted in 1"
    assert 'raise ValueError(f"planted in' in culprit.traceback
    assert "rank_testing/child.py" not in culprit.traceback
    assert sorted(victim.rank for victim in victims) == [0, 2]
    assert {victim.kind for victim in victims} == {"connection"}


def test_all_ranks_that_raise_are_reported() -> None:
    failure = failure_of(raise_on, 2, [0, 1])
    assert {report.rank: report.message for report in failure.ranks} == {
        0: "planted in 0",
        1: "planted in 1",
    }
    assert {report.kind for report in failure.ranks} == {"raised"}


def test_a_failing_assert_tells_its_values() -> None:
    failure = failure_of(compare, 2, 3)
    assert failure.ranks[0].exception_type == "AssertionError"
    assert "assert 2 == 3" in failure.ranks[0].message


def test_a_hung_rank_is_named_with_the_stacks_of_all(
    hang_from_arrival: Callable[[int], str],
) -> None:
    started_at = time.monotonic()
    failure = failure_of(sleep_on, 2, 1, hang_from_arrival(2))
    assert HANG_S <= time.monotonic() - started_at < HANG_S + MARGIN_S
    named = re.match(r"rank 1 of 2 hung: no end after (\d+\.\d) s", first_line(failure))
    assert named
    assert HANG_S <= float(named[1]) < HANG_S + MARGIN_S
    culprit, victim = failure.ranks
    assert (culprit.rank, culprit.kind, victim.rank, victim.kind) == (1, "hung", 0, "hung")
    assert "in sleep_on" in culprit.traceback
    assert "all_reduce" not in culprit.traceback
    assert "in all_reduce" in victim.traceback
    assert "rank_testing/child.py" not in str(failure)


def test_a_rank_that_holds_the_interpreter_lock_still_tells_where_it_is(
    hang_from_arrival: Callable[[int], str],
) -> None:
    failure = failure_of(hold_the_interpreter, 1, hang_from_arrival(1), init=None)
    assert failure.ranks[0].kind == "hung"
    assert "in hold_the_interpreter" in failure.ranks[0].traceback


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_killed_rank_is_named_before_its_victims(name: str) -> None:
    started_at = time.monotonic()
    failure = failure_of(die_on, 2, 1, getattr(signal, name))
    assert time.monotonic() - started_at < MARGIN_S
    assert first_line(failure).startswith(f"rank 1 of 2 died: killed by {name}")
    assert [(report.rank, report.kind) for report in failure.ranks] == [
        (1, "died"),
        (0, "connection"),
    ]
    assert ("in die_on" in failure.ranks[0].traceback) == (name != "SIGKILL")


@pytest.mark.parametrize("exit_code", [0, 7])
def test_a_rank_that_leaves_without_a_result_has_died(exit_code: int) -> None:
    failure = failure_of(leave, 1, exit_code)
    assert failure.ranks[0].kind == "died"
    assert failure.ranks[0].message == f"exit code {exit_code} before a result"


def test_sys_exit_is_an_exception_like_any_other() -> None:
    failure = failure_of(leave_by_exit, 1)
    assert (failure.ranks[0].kind, failure.ranks[0].exception_type) == ("raised", "SystemExit")


def test_a_result_that_cannot_be_pickled_is_the_ranks_failure() -> None:
    failure = failure_of(unpicklable_on, 2, 1)
    assert first_line(failure).startswith("rank 1 of 2 raised TypeError: the return value (lock)")
    assert "ranks that returned: 0" in str(failure)
    assert [report.rank for report in failure.ranks] == [1]


def test_a_result_that_cannot_be_read_back_is_the_ranks_failure() -> None:
    failure = failure_of(unreadable, 1, init=None)
    assert (failure.ranks[0].rank, failure.ranks[0].exception_type) == (0, "LookupError")
    assert "cannot be read back" in failure.ranks[0].message


def test_a_left_out_collective_is_found_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_LINGER_S", 1.0)  # that nobody needs here
    started_at = time.monotonic()
    failure = failure_of(skip_a_collective, 2, 1)
    assert time.monotonic() - started_at < MARGIN_S
    assert first_line(failure).startswith("rank 0 of 2 lost a connection")
    assert "ranks that returned: 1" in str(failure)
    assert "left out a collective" in str(failure)
    assert "all_reduce" in failure.ranks[0].traceback


def test_a_wrapped_connection_error_is_still_a_consequence() -> None:
    failure = failure_of(wrap_a_lost_connection, 3)
    assert [report.kind for report in failure.ranks] == ["raised", "connection", "connection"]
    assert failure.ranks[0].rank == 2
    assert {report.exception_type for report in failure.ranks[1:]} == {"AssertionError"}


def test_ranks_that_go_on_after_a_failure_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("watch", "report"):
        monkeypatch.setattr(f"rank_testing.{module}.GRACE_S", 4.0)
    started_at = time.monotonic()
    failure = failure_of(raise_while_others_sleep, 2, str(tmp_path))
    assert 4 <= time.monotonic() - started_at < MARGIN_S
    assert [(report.rank, report.kind) for report in failure.ranks] == [(0, "raised"), (1, "hung")]
    assert failure.ranks[1].message == "still running 4 s after the first failure"
    assert "in raise_while_others_sleep" in failure.ranks[1].traceback


def test_everything_that_a_rank_printed_is_shown_on_failure() -> None:
    failure = failure_of(print_and_raise, 2)
    (report,) = failure.ranks
    for text in ("on standard output", "on standard error", "from below Python"):
        assert text in report.output
        assert str(failure).count(text) == 2
    assert "DeprecationWarning: old name" in report.output


def test_long_output_is_cut_to_its_end() -> None:
    failure = failure_of(print_much, 1)
    assert "xthe end" in str(failure)
    assert "characters left out" in str(failure)
    assert len(str(failure)) < 10_000
    assert len(failure.ranks[0].output) > 100_000


def test_programs_started_by_a_rank_go_with_it(tmp_path: Path) -> None:
    failure_of(start_a_program_and_raise, 1, str(tmp_path), init=None)
    pid = int((tmp_path / "program").read_text())
    deadline = time.monotonic() + MARGIN_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before the file is open, or read
        return False
    return state != "Z"


def test_the_failure_survives_pickling() -> None:
    failure = failure_of(raise_on, 1, [0])
    copy = pickle.loads(pickle.dumps(failure))
    assert str(copy) == str(failure)
    assert copy.ranks == failure.ranks


def test_accelerator_ranks_say_what_the_machine_lacks() -> None:
    count = torch.accelerator.device_count()
    failure = failure_of(compare, count + 1, count + 1, init="cuda:nccl", timeout_s=300)
    assert f"needs {count + 1} accelerators, this machine has {count}" in str(failure)


def all_reduced_on_device() -> torch.Tensor:
    tensor = torch.ones(3, device=torch.accelerator.current_accelerator())
    dist.all_reduce(tensor)
    return tensor.cpu()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_ranks_reduce_on_their_own_device() -> None:
    count = torch.accelerator.device_count()
    results = run_ranks(all_reduced_on_device, count, init="cuda:nccl")
    assert [result.tolist() for result in results] == [[float(count)] * 3] * count
