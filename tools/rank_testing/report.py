"""The error of a failed run: the rank that failed first, how it failed, and its traceback."""

import os
import signal
from dataclasses import dataclass
from typing import Literal

from rank_testing import child
from rank_testing.watch import GRACE_S, Rank

Kind = Literal["raised", "died", "hung", "connection"]

_OUTPUT_CHARACTERS = 8000
_MESSAGE_CHARACTERS = 300
_LIFE_OF_A_RANK = f'File "{os.path.abspath(child.__file__)}"'
# Places in the order of suspicion: the likely culprit has the smallest, a mere victim the largest.
_FAILED_ALONE = 0
_HUNG_ALONE = 1
_HUNG_IN_A_COLLECTIVE = 2
_LOST_A_PEER = 3
_STOPPED = 4


@dataclass(frozen=True)
class RankReport:
    """The failure of one rank.

    Attributes:
        rank: its number.
        kind: "raised" an exception, "died" without one, "hung" until it was killed, or "connection"
            for an exception about a lost peer.
        exception_type: the name of the exception's class, empty if there is none.
        message: the text of the exception, or a description of the end.
        traceback: the traceback, or the Python stack of each thread of a rank that died or hung.
        output: everything that the rank printed, including warnings.
        elapsed_s: seconds from the start of the ranks to this end.
        place: the order of suspicion. The smallest is the likely culprit.
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
        message: the whole report. Its first line names the likely culprit.
        ranks: the ranks that failed, the likely culprit first.
    """

    def __init__(self, message: str, ranks: list[RankReport]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type["RankFailure"], tuple[str, list[RankReport]]]:
        return type(self), (str(self), self.ranks)


def diagnose(ranks: list[Rank], started_at: float, stopped_at: float) -> list[RankReport]:
    """Return a report for each rank that did not return, in the order of their numbers."""
    any_failed = any(rank.has_failed for rank in ranks)
    any_returned = any(rank.has_returned for rank in ranks)
    reports = []
    for rank in ranks:
        if rank.has_returned:
            continue
        kind: Kind
        traceback = format_stacks(rank.read("stack"))
        in_collective = is_in_torch_distributed(traceback)
        elapsed_s = (stopped_at if rank.ended_at is None else rank.ended_at) - started_at
        exception_type = ""
        if rank.outcome is not None:
            kind = "connection" if rank.outcome.kind == "connection" else "raised"
            place = _LOST_A_PEER if kind == "connection" else _FAILED_ALONE
            exception_type, message = rank.outcome.exception_type, rank.outcome.message
            traceback = rank.outcome.traceback
        elif rank.ended_at is not None:
            kind, place, message = "died", _FAILED_ALONE, _describe_death(rank.exit_code)
        elif any_failed:
            # Outside a collective it may have caused the other failures, unless a rank returned.
            kind, message = "hung", f"still running {GRACE_S:.0f} s after the first failure"
            place = _STOPPED if any_returned or in_collective else _HUNG_ALONE
        else:
            kind, message = "hung", f"no end after {elapsed_s:.1f} s"
            place = _HUNG_IN_A_COLLECTIVE if in_collective else _HUNG_ALONE
        output = rank.read("output")
        reports.append(
            RankReport(
                rank.number, kind, exception_type, message, traceback, output, elapsed_s, place
            )
        )
    return reports


def _describe_death(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code} before a result"
    names = {one.value: one.name for one in signal.Signals}  # not all numbers have a name
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def make_failure(
    reports: list[RankReport], returned: dict[int, str], world_size: int, function: str
) -> RankFailure:
    """Make the error of ``run_ranks``, with the likely culprit first in ``ranks``.

    ``returned`` holds the output of each rank that returned.
    """
    ordered = sorted(reports, key=lambda report: (report.place, report.elapsed_s, report.rank))
    culprit = ordered[0]
    message = " ".join(culprit.message.split())
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "..."
    ending = f"{culprit.kind}: {message}"
    if culprit.kind == "raised":
        ending = f"raised {culprit.exception_type}: {message}"
    elif culprit.kind == "connection":
        ending = f"lost a connection ({culprit.exception_type}: {message})"
    lines = [f"rank {culprit.rank} of {world_size} {ending}, in {function}"]
    if returned:
        lines.append(f"ranks that returned: {', '.join(str(rank) for rank in sorted(returned))}")
        if culprit.kind == "connection":
            lines.append("(they may have left out a collective that the others entered)")
    for report in ordered:
        head = f"{report.kind} after {report.elapsed_s:.1f} s"
        if report.kind in ("died", "hung"):
            head += f": {report.message}"
        lines += ["", f"==== rank {report.rank}: {head} ===="]
        if report.traceback:
            lines.append(report.traceback.rstrip())
        lines += _format_output(report.rank, report.output)
    for rank, output in sorted(returned.items()):
        if output.strip():
            lines += ["", f"==== rank {rank}: returned ====", *_format_output(rank, output)]
    return RankFailure("\n".join(lines), ordered)


def _format_output(rank: int, output: str) -> list[str]:
    if not output.strip():
        return []
    lines = [f"---- output of rank {rank} ----"]
    if (left_out := len(output) - _OUTPUT_CHARACTERS) > 0:
        lines.append(f"[{left_out} characters left out]")
    return [*lines, output[-_OUTPUT_CHARACTERS:].rstrip()]


def format_stacks(text: str) -> str:
    """Return the stacks of ``faulthandler`` without the harness's frames and threads."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        is_ours = [_LIFE_OF_A_RANK in line for line in lines]
        watches = any(line.endswith(" in wait_for_parent") for line in lines)
        if block.strip() and not watches and "Extension modules:" not in block:
            # The callers of the test's function follow it: they are all of the harness.
            blocks.append("\n".join(lines[: is_ours.index(True)] if any(is_ours) else lines))
    return "\n\n".join(blocks)


def is_in_torch_distributed(stacks: str) -> bool:
    """Return whether a thread was inside ``torch.distributed``, waiting for other ranks."""
    return f"torch{os.sep}distributed{os.sep}" in stacks
