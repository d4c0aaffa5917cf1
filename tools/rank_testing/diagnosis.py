"""Turn what was seen of the ranks into values and reports."""

import pickle
import signal
import traceback
from typing import Any

from rank_testing.files import output_path, stack_path, text_of
from rank_testing.messages import Outcome
from rank_testing.report import RankReport
from rank_testing.stacks import in_torch_distributed, readable_stacks
from rank_testing.watch import GRACE_S, Rank

# How much an end says about the cause, from the likely culprit to a mere victim.
_FAILED_BY_ITSELF = 0
_HUNG_ALONE = 1
_HUNG_IN_A_COLLECTIVE = 2
_LOST_A_PEER = 3
_STOPPED = 4


def read_values(ranks: list[Rank]) -> dict[int, Any]:
    """Return the value of each rank that returned one that this process can read.

    A rank whose value cannot be read has failed from here on.
    """
    values = {}
    for rank in ranks:
        if rank.outcome is None or not rank.returned:
            continue
        try:
            values[rank.number] = pickle.loads(rank.outcome.value)
        except Exception as error:
            rank.outcome = Outcome(
                "raised",
                rank.outcome.moment,
                exception_type=type(error).__qualname__,
                message=f"the return value cannot be read back from its pickle: {error}",
                traceback=traceback.format_exc(),
            )
    return values


def diagnose(
    ranks: list[Rank], folder: str, started_at: float, stopped_at: float
) -> list[RankReport]:
    """Return a report for each rank that did not return, in the order of their numbers.

    Args:
        ranks: all ranks of the run, none of them running any more.
        folder: the folder with the files that they wrote.
        started_at: `time.monotonic()` of their start.
        stopped_at: `time.monotonic()` when the test process stopped waiting.
    """
    any_failed = any(rank.failed for rank in ranks)
    any_returned = any(rank.returned for rank in ranks)
    reports = []
    for rank in ranks:
        if rank.returned:
            continue
        output = text_of(output_path(folder, rank.number))
        stacks = readable_stacks(text_of(stack_path(folder, rank.number)))
        elapsed_s = (stopped_at if rank.ended_at is None else rank.ended_at) - started_at
        if rank.outcome is not None:
            report = _raised(rank.number, rank.outcome, output, elapsed_s)
        elif rank.ended_at is not None:
            report = _died(rank.number, rank.exit_code, stacks, output, elapsed_s)
        elif any_failed:
            report = _stopped(rank.number, stacks, output, elapsed_s, any_returned)
        else:
            report = _hung(rank.number, stacks, output, elapsed_s)
        reports.append(report)
    return reports


def _raised(rank: int, outcome: Outcome, output: str, elapsed_s: float) -> RankReport:
    lost_a_peer = outcome.kind == "connection"
    return RankReport(
        rank,
        "connection" if lost_a_peer else "raised",
        outcome.exception_type,
        outcome.message,
        outcome.traceback,
        output,
        elapsed_s,
        _LOST_A_PEER if lost_a_peer else _FAILED_BY_ITSELF,
    )


def _died(
    rank: int, exit_code: int | None, stacks: str, output: str, elapsed_s: float
) -> RankReport:
    message = _death(exit_code)
    return RankReport(rank, "died", "", message, stacks, output, elapsed_s, _FAILED_BY_ITSELF)


def _hung(rank: int, stacks: str, output: str, elapsed_s: float) -> RankReport:
    message = f"no end after {elapsed_s:.1f} s"
    place = _HUNG_IN_A_COLLECTIVE if in_torch_distributed(stacks) else _HUNG_ALONE
    return RankReport(rank, "hung", "", message, stacks, output, elapsed_s, place)


def _stopped(
    rank: int, stacks: str, output: str, elapsed_s: float, any_returned: bool
) -> RankReport:
    """Report a rank that still ran a while after another one had failed.

    Outside a collective it may be what the others missed, unless one of them had returned.
    """
    message = f"still running {GRACE_S:.0f} s after the first failure"
    alone = not any_returned and not in_torch_distributed(stacks)
    place = _HUNG_ALONE if alone else _STOPPED
    return RankReport(rank, "hung", "", message, stacks, output, elapsed_s, place)


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit code is unknown"
    if exit_code >= 0:
        return f"exit code {exit_code} before a result"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
