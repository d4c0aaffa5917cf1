"""One combination on its ranks: the steps, the gradients of the first, and its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from layouts.combinations import AFTER, STEPS
from mcore.parallel.checkpoint import ShardedTensor
from mcore.tensor import to_local_if_dtensor
from pretrain.model.router import Router
from pretrain.optim.main_weights import MainWeightOptimizer
from pretrain.run.loop import Loop
from pretrain.run.training import build_loop
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings

CPU = torch.device("cpu")
# Logits and experts of tokens by step and layer, part after part.
_Routes = dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]]


@dataclasses.dataclass
class Result:
    """The numbers of a combination, from step ``first`` on."""

    first: int
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    routes: str = ""  # the file of the experts of each token


@dataclasses.dataclass(frozen=True)
class Task:
    """A combination to train from the start, or from the checkpoint of another combination."""

    settings: Settings
    run_dir: str
    resumes: bool
    result: str  # the file for it
    steps: int = STEPS  # from the start


def do_tasks(tasks: list[Task], limit_s: int) -> None:
    """Do tasks of one number of ranks, one after the other. The first rank writes each result.

    A failure, or a task over the limit, ends all ranks: the first task without a result failed.
    """
    for task in tasks:
        with limit_time(limit_s):
            began = time.perf_counter()
            result = _train(task)
            result.seconds = time.perf_counter() - began
            if dist.get_rank() == 0:
                Path(task.result).write_text(json.dumps(dataclasses.asdict(result)))
            gc.collect()
            dist.barrier()


@contextlib.contextmanager
def limit_time(limit_s: int) -> Iterator[None]:
    """Kill this process if the block takes longer, after writing its stack.

    Works also while Python code cannot run: the handler is written in C.
    """
    faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
    signal.alarm(limit_s)
    yield
    signal.alarm(0)


def _train(task: Task) -> Result:
    path = Path(task.run_dir)
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    begun = path if task.resumes else None
    loop = build_loop(task.settings, RunFolder(path), CPU, begun, False, None, lambda: 0)
    result = Result(loop.progress.step + 1)
    routes: _Routes = {}
    for step in range(result.first, result.first + (AFTER if task.resumes else task.steps)):
        with _note_routes(loop.steps.model, step, routes):
            found = _run_step(loop, step)
        if step == 1:
            result.gradients = found.gradients
        result.losses += found.losses
        result.norms += found.norms
    if not task.resumes:
        loop.progress.step = task.steps
        loop.progress.consumed_train_samples = task.steps * task.settings.global_batch_size
        loop.saver.save(task.steps)
        loop.saver.wait()
    if task.settings.experts:
        result.routes = _save_routes(routes, f"{task.result}.routes")
    loop.observed.close()
    loop.watch.close()
    return result


@contextlib.contextmanager
def _note_routes(model: torch.nn.Module, step: int, routes: _Routes) -> Iterator[None]:
    """Note the logits and the experts of each token in a step, by step and layer."""

    def note(router: Router, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            logits = F.linear(inputs[0].float(), router.weight.float())
        found = (logits.flatten(0, -2), output[1].flatten(0, -2))
        routes.setdefault((step, router.number), []).append(found)

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if isinstance(module, Router)
    ]
    yield
    for hook in hooks:
        hook.remove()


def _save_routes(routes: _Routes, path: str) -> str:
    """Write the routes of all ranks into one file on the first rank."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, routes)
    if dist.get_rank() == 0:
        joined: _Routes = {}
        for of_rank in of_ranks:
            for place, parts in of_rank.items():
                joined.setdefault(place, []).extend(parts)
        whole = {
            place: tuple(torch.cat(each) for each in zip(*parts, strict=True))
            for place, parts in joined.items()
        }
        torch.save(whole, path)
    return path


def _run_step(loop: Loop, step: int) -> Result:
    """One step. The first step also returns the norms of the gradients before clipping."""
    gradients: dict[str, float] = {}
    optimizer: Any = loop.steps.optimizer
    clip = optimizer.clip_gradients

    def clip_gradients(limit: float) -> torch.Tensor:
        gradients.update(_measure_gradients(loop))
        norm: torch.Tensor = clip(limit)
        return norm

    if step == 1:
        optimizer.clip_gradients = clip_gradients
    loss, norm, _, skipped = loop.steps.train_step(step)
    optimizer.clip_gradients = clip
    if skipped:
        raise RuntimeError(f"step {step} had gradients that were not finite")
    return Result(step, [float(loss)], [float(norm)], gradients)


def _measure_gradients(loop: Loop) -> dict[str, float]:
    """The norm of each parameter's whole gradient, by its name in checkpoints, on all ranks.

    Pieces are exchanged with their place in the whole: a copy replaces the piece it equals.
    """
    model, groups = loop.steps.model, loop.groups
    metadata = {"dp_cp_group": groups.dp_cp, "tp_group": groups.tp}
    state = model.sharded_state_dict(prefix="", metadata=metadata)
    gradients = _find_gradients(loop)
    local: dict[tuple[str, Any], float] = {}
    for value in state.values():
        if isinstance(value, ShardedTensor) and id(value.data) in gradients:
            place = (tuple(value.global_offset), _find_shard(value.data))
            square = gradients[id(value.data)].double().square().sum()
            local[value.key, place] = float(square)
    of_ranks: list[dict[tuple[str, Any], float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, local)
    squares: dict[str, float] = {}
    pieces = {place: piece for found in of_ranks for place, piece in found.items()}
    for (name, _), piece in pieces.items():
        squares[name] = squares.get(name, 0.0) + piece
    return {name: square**0.5 for name, square in sorted(squares.items())}


def _find_gradients(loop: Loop) -> dict[int, torch.Tensor]:
    """This rank's reduced gradients by the identity of their parameters."""
    optimizer: Any = loop.steps.optimizer
    is_whole = isinstance(optimizer, MainWeightOptimizer)
    owners = optimizer.main if is_whole else optimizer.params
    return {
        id(param): to_local_if_dtensor(owner.grad)
        for param, owner in zip(optimizer.params, owners, strict=True)
        if owner.grad is not None
    }


def _find_shard(data: Any) -> int:
    """The index of this rank's FSDP shard. 0 without FSDP."""
    if not isinstance(data, DTensor):
        return 0
    coordinate = data.device_mesh.get_coordinate()
    return -1 if coordinate is None else coordinate[-1]
