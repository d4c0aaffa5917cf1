"""Say which rank failed first, how, and where."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "died", "hung", "connection"]

_OUTPUT_CHARACTERS = 8000
_MESSAGE_CHARACTERS = 300


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
    """Make the error that `run_ranks` raises.

    Args:
        reports: one report for each rank that failed, at least one.
        returned: what each rank whose function returned has printed.
        world_size: the number of ranks.
        function: the name of the function, with its file.

    Returns:
        The error, whose `ranks` are sorted: the likely culprit first, victims last.

    Example:
        >>> dead = RankReport(1, "died", "", "killed by SIGSEGV", "", "", 0.1, place=0)
        >>> print(rank_failure([dead], {0: ""}, 2, "test_a.py::step"))
        rank 1 of 2 died: killed by SIGSEGV, in test_a.py::step
        ranks that returned: 0
        <BLANKLINE>
        ==== rank 1: died after 0.1 s: killed by SIGSEGV ====
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
