"""The steps of all combinations: in worlds of forked ranks, which go on where one has failed."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from layouts.cell import Result, Task, do_tasks
from layouts.combinations import AFTER, FIXED, RANKS, STEPS, combinations, name_of, others
from layouts.reference import PlainGPT, loss_in_parts, train_plain
from layouts.table import Reference, Row, take_load, take_steps, tolerance_of
from pretrain.settings import Settings
from rank_testing import RankFailure, preload, run_ranks

preload("layouts.cell")

_IN_A_WORLD = 12  # more would leave too many process groups behind
_A_TASK_S = 60.0


def write_text(folder: Path) -> str:
    """Write records of many lengths, from one byte to several windows; return their file."""
    draw = random.Random(7)
    lengths = [draw.choice((0, 6, 20, 45, 70, 130)) for _ in range(200)]
    texts = ["".join(draw.choices("abcdefgh \n", k=length)) for length in lengths]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def compare(chosen: Sequence[Settings], every: list[Settings], folder: Path) -> Iterator[Row]:
    """Yield the row of each chosen combination, whose checkpoints are loaded in some of all.

    Forks ranks; call it in a process that is no rank.
    """
    references = _references(chosen)
    rows, runs, loads = [], [], []
    for number, settings in enumerate(chosen):
        rows.append(Row(name_of(settings), settings.world_size, tolerance_of(settings)))
        run_dir = folder / f"run-{number}"
        runs.append(Task(settings, str(run_dir), False, f"{run_dir}.json"))
    for row, task, result in zip(rows, runs, _results(runs), strict=True):
        take_steps(row, result, references[_kind(task.settings)])
        if result.error:
            continue
        for place, other in enumerate(others(task.settings, every)):
            row.to_load += 1
            copied = f"{task.run_dir}-{place}"
            loads.append((row, Task(other, copied, True, f"{copied}.json"), task.run_dir))
    for _, task, source in loads:
        shutil.copytree(source, task.run_dir)
    found = _results([task for _, task, _ in loads])
    for (row, task, _), result in zip(loads, found, strict=True):
        take_load(row, result, references[_kind(task.settings)], name_of(task.settings))
    yield from rows


def _kind(settings: Settings) -> Settings:
    """The settings of the one process that a combination is compared with."""
    fixed = {name: getattr(settings, name) for name in FIXED if name != "bf16"}
    return dataclasses.replace(_plain(settings.data), **fixed)


@functools.cache
def _plain(data: str) -> Settings:
    return next(combinations(1, data))


def _references(chosen: Sequence[Settings]) -> dict[Settings, Reference]:
    return {kind: _reference(kind) for kind in {_kind(one) for one in chosen}}


def _reference(settings: Settings) -> Reference:
    """Train the plain model in float64; the steps after the last are those behind a checkpoint."""
    lines = Path(settings.data).read_text().splitlines()
    documents = [(json.loads(line)["text"] + "\n").encode() for line in lines]
    first = PlainGPT(settings).double()
    torch.autograd.backward(loss_in_parts(first, settings, documents)(1))
    gradients = {
        name.replace("/", "."): float(weight.grad.norm())
        for name, weight in first.weights.items()
        if weight.grad is not None
    }
    model = PlainGPT(settings).double()
    losses, norms = train_plain(
        model, settings, loss_in_parts(model, settings, documents), steps=STEPS + AFTER
    )
    return Reference(losses, norms, gradients)


def _results(tasks: Sequence[Task]) -> list[Result]:
    """What each task has found, one number of ranks after the other."""
    for ranks in RANKS:
        own = [task for task in tasks if task.settings.world_size == ranks]
        for first in range(0, len(own), _IN_A_WORLD):
            _run(own[first : first + _IN_A_WORLD], ranks)
            print(f"{ranks} ranks: {min(first + _IN_A_WORLD, len(own))} of {len(own)}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return [Result(**json.loads(Path(task.result).read_text())) for task in tasks]


def _run(tasks: list[Task], ranks: int) -> None:
    """Run tasks in one world; where one of them fails, the others in a new one."""
    while tasks:
        try:
            run_ranks(do_tasks, ranks, tasks, timeout_s=_A_TASK_S * len(tasks))
            return
        except RankFailure as failure:
            left = [task for task in tasks if not Path(task.result).exists()]
            if not left:
                return
            told = failure.ranks[0].message if failure.ranks else str(failure)
            error = Result(1, error=str(told).strip().splitlines()[-1])
            Path(left[0].result).write_text(json.dumps(dataclasses.asdict(error)))
            tasks = left[1:]
