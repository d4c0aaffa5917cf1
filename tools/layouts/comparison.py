"""The steps of all combinations, in worlds of forked ranks. A failure ends only its combination."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from layouts.cell import Result, Task, do_tasks
from layouts.combinations import AFTER, RANKS, STEPS, name_of, others
from layouts.experts import PlainExperts, Routes, RoutingError
from layouts.reference import PlainGPT, loss_in_parts, train_plain, without_layout
from layouts.table import Reference, Row, compare_load, compare_steps, tolerance_of
from pretrain.settings import Settings
from rank_testing import RankFailure, preload, run_ranks
from results.machine import describe_machine, join_facts, timestamp

preload("layouts.cell", "layouts.text_in_memory")

_AT_ONCE = 6  # combinations whose checkpoints are kept until all have been loaded
_IN_A_WORLD = 12  # more would leave too many process groups behind
_TASK_S = 90  # on eight ranks that share two busy cores it takes up to 20


def write_text(folder: Path) -> str:
    """Write records of many lengths, from one byte to several windows. Returns their file."""
    draw = random.Random(7)
    lengths = [draw.choice((0, 6, 20, 45, 70, 130)) for _ in range(200)]
    texts = ["".join(draw.choices("abcdefgh \n", k=length)) for length in lengths]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def compare(
    wanted: Sequence[Settings], every: list[Settings], folder: Path, deadline: float = math.inf,
    steps: int = STEPS,
) -> Iterator[Row]:  # fmt: skip
    """Yield the row of each wanted combination. Some of ``every`` load its checkpoint.

    Forks ranks: call it in a process that is no rank. Nothing begins after the deadline, of
    ``time.monotonic()``.
    """
    for first in range(0, len(wanted), _AT_ONCE):
        if time.monotonic() >= deadline:
            return
        runs = folder / f"runs-{first}"
        yield from _compare_batch(wanted[first : first + _AT_ONCE], every, runs, steps)
        shutil.rmtree(runs)


def _compare_batch(
    wanted: Sequence[Settings], every: list[Settings], folder: Path, steps: int
) -> list[Row]:
    folder.mkdir()
    rows, tasks = [], []
    loads: list[tuple[Row, Settings, Result, Task]] = []
    for number, settings in enumerate(wanted):
        facts = (tolerance_of(settings), timestamp(), join_facts(describe_machine()))
        rows.append(Row(name_of(settings), settings.world_size, settings.num_layers, *facts))
        run_dir = folder / f"{number}"
        tasks.append(Task(settings, str(run_dir), False, f"{run_dir}.json", steps))
    for row, task, result in zip(rows, tasks, _run_tasks(tasks), strict=True):
        settings = task.settings
        judge = functools.partial(compare_steps, result=result, experts_together=settings.bf16)
        _compare_as_routed(row, settings, steps, [result], judge)
        if result.error:
            continue
        for place, other in enumerate(others(task.settings, every)):
            row.to_load += 1
            copied = f"{task.run_dir}-{place}"
            shutil.copytree(task.run_dir, copied)
            loads.append((row, settings, result, Task(other, copied, True, f"{copied}.json")))
    found = _run_tasks([task for *_, task in loads])
    for (row, settings, begun, task), result in zip(loads, found, strict=True):
        load = functools.partial(compare_load, result=result, layout=name_of(task.settings))
        _compare_as_routed(row, settings, steps, [begun, result], load)
    return rows


def _compare_as_routed(
    row: Row, settings: Settings, steps: int, results: list[Result], judge: Callable[..., None]
) -> None:
    """Judge results by the reference, or by the reference with their choices of experts.

    At a tie the bits of a CPU's kernels decide which expert a token reaches. Only ties are taken
    over. The bounds of bf16 include them.
    """
    reference, first_try = reference_of(settings, steps), dataclasses.replace(row, problems=[])
    judge(first_try, reference=reference)
    is_routed = settings.experts and not settings.bf16 and all(one.routes for one in results)
    if first_try.problems and is_routed:
        routes = {
            place: route for one in results for place, route in torch.load(one.routes).items()
        }
        try:
            reference, ties = _train_routed(without_layout(settings), steps, routes)
        except RoutingError as error:
            row.problems.append(str(error))
            return
        row.ties += ties
    judge(row, reference=reference)


def reference_of(settings: Settings, steps: int) -> Reference:
    """The float64 process that a combination is compared with, computed once."""
    return _train_reference(without_layout(settings), steps)


@functools.cache
def _train_reference(settings: Settings, steps: int) -> Reference:
    return _train_routed(settings, steps, {})[0]


def _train_routed(settings: Settings, steps: int, routes: Routes) -> tuple[Reference, int]:
    """Train the plain model in float64, and continue with the steps after a checkpoint.

    Also returns the number of tokens that took another expert because of ``routes``.
    """
    lines = Path(settings.data).read_text().splitlines()
    documents = [(json.loads(line)["text"] + "\n").encode() for line in lines]
    model = (PlainExperts if settings.experts else PlainGPT)(settings).double()
    if isinstance(model, PlainExperts):
        model.routes = routes
    loss_of = loss_in_parts(model, settings, documents)
    torch.autograd.backward(loss_of(1))
    gradients = {name: float(grad.norm()) for name, grad in model.gradients().items()}
    before = getattr(model, "ties", 0)
    losses, norms = train_plain(model, settings, loss_of, steps=steps + AFTER)
    return Reference(losses, norms, gradients), getattr(model, "ties", 0) - before


def _run_tasks(tasks: Sequence[Task]) -> list[Result]:
    """Run the tasks, one number of ranks after the other."""
    for ranks in RANKS:
        group = [task for task in tasks if task.settings.world_size == ranks]
        for first in range(0, len(group), _IN_A_WORLD):
            _run_in_worlds(group[first : first + _IN_A_WORLD], ranks)
    return [Result(**json.loads(Path(task.result).read_text())) for task in tasks]


def _run_in_worlds(tasks: list[Task], ranks: int) -> None:
    """Run tasks in one world. After a failure the rest runs in a new world."""
    while tasks:
        try:
            run_ranks(do_tasks, ranks, tasks, _TASK_S, timeout_s=2.0 * _TASK_S * len(tasks))
            return
        except RankFailure as failure:
            left = [task for task in tasks if not Path(task.result).exists()]
            if not left:
                return
            print(f"{name_of(left[0].settings)}: {failure}", file=sys.stderr, flush=True)
            message = (failure.ranks[0].message if failure.ranks else str(failure)).strip()
            if signal.SIGALRM.name in message:
                message = f"no end after {_TASK_S} s"
            error = Result(1, error=message.splitlines()[-1])
            Path(left[0].result).write_text(json.dumps(dataclasses.asdict(error)))
            tasks = left[1:]
