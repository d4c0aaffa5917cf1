"""The error of a failed run: which rank failed first, how, and where."""

import os
import pickle
import signal
import traceback
from dataclasses import dataclass
from typing import Any, Literal

from rank_testing.messages import Outcome, output_path, stack_path, text_of
from rank_testing.watch import GRACE_S, Rank

Kind = Literal["raised", "died", "hung", "connection"]

_OUTPUT_CHARACTERS = 8000
_MESSAGE_CHARACTERS = 300
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PARENT_WATCHER = f'File "{os.path.join(_FOLDER, "orphans.py")}"'
_LIFE_OF_A_RANK = f'File "{os.path.join(_FOLDER, "child.py")}"'
# How much an end says about the cause, from the likely culprit to a mere victim.
_FAILED_BY_ITSELF = 0
_HUNG_ALONE = 1
_HUNG_IN_A_COLLECTIVE = 2
_LOST_A_PEER = 3
_STOPPED = 4


@dataclass(frozen=True)
class RankReport:
    """How one rank failed.

    Attributes:
        rank: its number.
        kind: "raised" an exception, "died" without one, "hung" until it was killed, or "connection"
            for an exception that says a peer is gone.
        exception_type: the name of the exception's class; empty where there is none.
        message: the text of the exception, or what is known of the end.
        traceback: the traceback, or the Python stack of each thread of a rank that died or hung.
        output: what the rank printed, its warnings included.
        elapsed_s: seconds from the start of the ranks to this end.
        place: how much the end says about the cause; the smallest is the likely culprit.
    """

    rank: int
    kind: Kind
    exception_type: str
    message: str
    traceback: str
    output: str
    elapsed_s: float
    place: int


class RankFailure(AssertionError):  # noqa: N818 - tests read "raises RankFailure"
    """At least one rank raised, died or hung.

    Args:
        message: the whole report; its first line names the likely culprit.
        ranks: the ranks that failed, the likely culprit first.
    """

    def __init__(self, message: str, ranks: list[RankReport]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type["RankFailure"], tuple[str, list[RankReport]]]:
        return type(self), (str(self), self.ranks)


def rank_failure(
    reports: list[RankReport], returned: dict[int, str], world_size: int, function: str
) -> RankFailure:
    """Make the error of ``run_ranks``, whose ``ranks`` have the likely culprit first.

    ``returned`` is what each rank whose function returned has printed.
    """
    ordered = sorted(reports, key=lambda report: (report.place, report.elapsed_s, report.rank))
    culprit = ordered[0]
    lines = [f"rank {culprit.rank} of {world_size} {_ending(culprit)}, in {function}"]
    if returned:
        lines.append(f"ranks that returned: {', '.join(str(rank) for rank in sorted(returned))}")
        if culprit.kind == "connection":
            lines.append("(they may have left out a collective that the others entered)")
    for report in ordered:
        lines += ["", *_section(report)]
    for rank, output in sorted(returned.items()):
        if output.strip():
            lines += ["", f"==== rank {rank}: returned ====", *_printed(rank, output)]
    return RankFailure("\n".join(lines), ordered)


def _ending(report: RankReport) -> str:
    message = " ".join(report.message.split())
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "..."
    if report.kind == "raised":
        return f"raised {report.exception_type}: {message}"
    if report.kind == "connection":
        return f"lost a connection ({report.exception_type}: {message})"
    return f"{report.kind}: {message}"


def _section(report: RankReport) -> list[str]:
    head = f"{report.kind} after {report.elapsed_s:.1f} s"
    if report.kind in ("died", "hung"):
        head += f": {report.message}"
    lines = [f"==== rank {report.rank}: {head} ===="]
    if report.traceback:
        lines.append(report.traceback.rstrip())
    return [*lines, *_printed(report.rank, report.output)]


def _printed(rank: int, output: str) -> list[str]:
    if not output.strip():
        return []
    lines = [f"---- output of rank {rank} ----"]
    if (left_out := len(output) - _OUTPUT_CHARACTERS) > 0:
        lines.append(f"[{left_out} characters left out]")
    return [*lines, output[-_OUTPUT_CHARACTERS:].rstrip()]


def readable_stacks(text: str) -> str:
    """Return the stacks of ``faulthandler`` without the harness's own frames and threads."""
    blocks = (_without_callers(block) for block in text.split("\n\n") if _says_something(block))
    return "\n\n".join(blocks)


def in_torch_distributed(stacks: str) -> bool:
    """Return whether a thread was inside ``torch.distributed``, where a rank waits for others."""
    return f"torch{os.sep}distributed{os.sep}" in stacks


def _says_something(block: str) -> bool:
    return (
        bool(block.strip()) and _PARENT_WATCHER not in block and "Extension modules:" not in block
    )


def _without_callers(block: str) -> str:
    lines = block.strip("\n").split("\n")
    for number, line in enumerate(lines):
        if _LIFE_OF_A_RANK in line:
            return "\n".join(lines[:number])
    return "\n".join(lines)


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
    """Return a report for each rank that did not return, in the order of their numbers."""
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
