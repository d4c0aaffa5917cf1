"""Runs of the main job in worlds of forked ranks that are shared: a process warms up once."""

from __future__ import annotations

import itertools
from pathlib import Path

from pretrain.settings import Settings
from pretrain_runs import train_here
from rank_testing import run_ranks

Job = tuple[str, Settings]  # the folder of a run below a common one, and its settings
_IN_A_WORLD = 12  # runs: more would leave too many process groups behind


def train_all(jobs: list[Job], folder: Path, *, kind: str = "cpu") -> list[list[str]]:
    """Train one run after the other. A folder that comes again is resumed.

    Returns what each rank has printed in each run.
    """
    done: list[str] = []
    printed: list[list[str]] = []
    for size, group in itertools.groupby(jobs, lambda job: job[1].world_size):
        while part := list(itertools.islice(group, _IN_A_WORLD)):
            work = []
            for name, settings in part:
                work.append((settings, str(folder / name), name in done))
                done.append(name)
            init = "gloo" if kind == "cpu" else f"{kind}:{kind}_nccl"
            of_ranks = run_ranks(_train_here, size, work, kind, init=init, timeout_s=900)
            printed += map(list, zip(*of_ranks, strict=True))
    return printed


def _train_here(work: list[tuple[Settings, str, bool]], kind: str) -> list[str]:
    return [train_here(one, path, resume=resume, kind=kind) for one, path, resume in work]
