"""The table of a campaign, as Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from faults.deck import KINDS, PHASES, RANKS, STEPS
from faults.journal import Result
from faults.trial import BEYOND_TIMEOUT_S, Happened

_HEAD = """# Faults

`hatch run faults` runs the main job, breaks it again and again, and compares what is left with an
undisturbed run of the same seed: final weights and optimizer bit by bit, every metric of every step
in `metrics.jsonl` and MLflow, every checkpoint whose save had returned. Each job has {ranks} ranks
and {steps} steps. Ranks are forked and ended as torchrun does it, or started again by torchrun
itself, by torchrun on two nodes that meet at a store of neither, or by a scheduler that repeats the
command. The job carries no code for this: `tools/faults/inside.py` wraps its functions from
outside, and a new phase is a row in `tools/faults/deck.py`. With `--keep FOLDER` an interrupted
campaign goes on where it was. `hatch run dev:python -m faults.slurm` does the same to a Slurm on
this machine.

`{command}` did what is below.
"""


def page(result: Result, command: str, had_disk: bool) -> str:
    """All that a campaign has done, for a reader who was not there."""
    lines = [
        *_HEAD.format(ranks=RANKS, steps=STEPS, command=command).splitlines(),
        "",
        *_facts(result, had_disk),
        "",
        *_by_kind_and_phase(result.happened),
        "",
        *_by_kind(result.happened),
    ]
    if late := [one for one in result.happened if _is_over(one, result.timeout_s)]:
        lines += ["", "## Over the bound because the machine was late", ""]
        lines += [
            f"- {one.fault}: {one.ended_s:.1f} s, {one.late_s:.1f} s of them without a core for "
            "the campaign's own clock"
            for one in late
        ]
    if result.failed:
        lines += ["", "## Problems", ""]
        lines += [f"- {name}: {text}" for name, all_ in result.failed.items() for text in all_]
    return "\n".join(lines) + "\n"


def _facts(result: Result, had_disk: bool) -> Iterator[str]:
    happened = result.happened
    recovered = sum(one.recovered_s is not None for one in happened)
    slowest = max((one.ended_s for one in happened if one.ended_s is not None), default=0.0)
    real = sum(one.launcher != "forked" for one in happened)
    bound = result.timeout_s + BEYOND_TIMEOUT_S
    versions = f"CPython {platform.python_version()}, torch {torch.__version__}"
    disk = "a small tmpfs" if had_disk else "left out: this machine lets nobody mount a tmpfs"
    wrong = sum(map(len, result.failed.values()))
    sessions = f", in {result.sessions} sessions" if result.sessions > 1 else ""
    late = sum(_is_over(one, result.timeout_s) for one in happened)
    yield from [
        "| | |",
        "|---|---|",
        f"| date, seed | {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {result.seed} |",
        f"| machine | {len(os.sched_getaffinity(0))} CPUs, {versions} |",
        f"| faults | {len(happened)} in {result.trials} runs and {result.starts} starts, "
        f"{result.seconds / 60:.0f} minutes{sessions}; {real} of them under torchrun or the job's "
        "own launcher, the others in forked ranks |",
        f"| recovered | {recovered} |",
        f"| the last rank ended | at most {slowest:.1f} s after a fault "
        f"(bound: {bound:.0f} s, the timeout of collectives + {BEYOND_TIMEOUT_S:.0f} s) |",
        f"| over the bound because the machine was late | {late or 'none'} |",
        f"| full disk | {disk} |",
        f"| hangs, lost acknowledged checkpoints, lost or doubled metric points, "
        f"differing final weights | {wrong or 'none'} |",
    ]


def _is_over(one: Happened, timeout_s: float) -> bool:
    return one.ended_s is not None and one.ended_s > timeout_s + BEYOND_TIMEOUT_S


def _by_kind_and_phase(happened: Sequence[Happened]) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for one in happened:
        counts[one.fault.phase, one.fault.kind] += 1
    kinds = [kind for kind in KINDS if any(one.fault.kind == kind for one in happened)]
    yield "| phase | " + " | ".join(kinds) + " |"
    yield "|---" * (len(kinds) + 1) + "|"
    for phase in PHASES:
        row = [counts[phase.name, kind] for kind in kinds]
        if any(row):
            yield f"| {phase.name} | " + " | ".join(str(count or "") for count in row) + " |"


def _by_kind(happened: Sequence[Happened]) -> Iterator[str]:
    yield "| fault | times | recovered | ranks ended after at most | steps went on after at most |"
    yield "|---|---|---|---|---|"
    for kind, meaning in KINDS.items():
        these = [one for one in happened if one.fault.kind == kind]
        if not these:
            continue
        ended = max((one.ended_s for one in these if one.ended_s is not None), default=None)
        on = max((one.recovered_s for one in these if one.recovered_s is not None), default=None)
        recovered = sum(one.recovered_s is not None for one in these)
        yield (
            f"| {kind}: {meaning} | {len(these)} | {recovered} | {_seconds(ended)} | "
            f"{_seconds(on)} |"
        )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
