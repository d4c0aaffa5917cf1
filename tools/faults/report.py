"""The page of a campaign, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from faults.deck import KINDS, PHASES, RANKS, STEPS
from faults.journal import Result
from faults.trial import BEYOND_TIMEOUT_S, Happened
from results.machine import describe_machine, join_facts, timestamp
from results.page import markdown_table, read_head

_LATE = "over the bound because the machine was late"
_COLUMNS = ("fault", "times", "recovered", "ranks ended after at most", "steps after at most")


def page(result: Result, command: str, had_disk: bool) -> str:
    """The whole page of a campaign."""
    kinds = [kind for kind in KINDS if any(one.fault.kind == kind for one in result.happened)]
    parts = [
        read_head(__file__, RANKS=RANKS, STEPS=STEPS, command=command),
        markdown_table(("", ""), _list_facts(result, had_disk)),
        "",
        markdown_table(("phase", "times", "faults"), _count_phases(result.happened)),
        "",
        markdown_table(_COLUMNS, _summarize_kinds(result.happened, kinds)),
    ]
    if late := [one for one in result.happened if _is_over(one, result.timeout_s)]:
        parts += ["", f"## {_LATE.capitalize()}", ""]
        parts += [
            f"- {one.fault}: {one.ended_s:.1f} s, {one.late_s:.1f} s of them without a core for "
            "the campaign's clock"
            for one in late
        ]
    if result.failed:
        parts += ["", "## Problems", ""]
        parts += [f"- {name}: {text}" for name, texts in result.failed.items() for text in texts]
    return "\n".join(parts) + "\n"


def _list_facts(result: Result, had_disk: bool) -> Iterator[tuple[str, str]]:
    happened = result.happened
    real = sum(one.launcher != "forked" for one in happened)
    sessions = f", in {result.sessions} sessions" if result.sessions > 1 else ""
    bound = result.timeout_s + BEYOND_TIMEOUT_S
    yield "date, seed", f"{timestamp()}, {result.seed}"
    yield "machine", join_facts(describe_machine())
    yield (
        "faults",
        f"{len(happened)} in {result.trials} runs and {result.starts} starts, "
        f"{result.seconds / 60:.0f} minutes{sessions}. {real} of them under a real launcher, the "
        "others in forked ranks",
    )
    yield "recovered", str(sum(one.recovered_s is not None for one in happened))
    yield (
        "the last rank ended",
        f"at most {max((one.ended_s or 0.0 for one in happened), default=0.0):.1f} s after a fault "
        f"(bound: {bound:.0f} s, the timeout of collectives + {BEYOND_TIMEOUT_S:.0f} s)",
    )
    yield _LATE, str(sum(_is_over(one, result.timeout_s) for one in happened) or "none")
    yield "full disk", "a small tmpfs" if had_disk else "left out: no permission to mount a tmpfs"
    wrong = sum(map(len, result.failed.values()))
    yield (
        "hangs, lost acknowledged checkpoints, lost or doubled metric points, "
        "differing final weights",
        str(wrong or "none"),
    )


def _is_over(one: Happened, timeout_s: float) -> bool:
    return one.ended_s is not None and one.ended_s > timeout_s + BEYOND_TIMEOUT_S


def _count_phases(happened: Sequence[Happened]) -> Iterator[list[str]]:
    for phase in PHASES:
        if found := Counter(one.fault.kind for one in happened if one.fault.phase == phase.name):
            listed = (kind if count == 1 else f"{count} {kind}" for kind, count in found.items())
            yield [phase.name, str(sum(found.values())), ", ".join(listed)]


def _summarize_kinds(happened: Sequence[Happened], kinds: Sequence[str]) -> Iterator[list[str]]:
    for kind in kinds:
        these = [one for one in happened if one.fault.kind == kind]
        ended = [one.ended_s for one in these if one.ended_s is not None]
        recovered = [one.recovered_s for one in these if one.recovered_s is not None]
        longest = [f"{max(times):.1f} s" if times else "" for times in (ended, recovered)]
        yield [f"{kind}: {KINDS[kind]}", str(len(these)), str(len(recovered)), *longest]
