"""``mcore.parallel`` against megatron-core and megatron-fsdp, on ranks that one process plays.

- torch's fake process group simulates the ranks.
- On a CPU the peer's fork reads and writes the CPU's generator in place of CUDA's.
- A cp slice and an index check more than the peers do: the lengths of all tensors, and that all
  ranks request the same.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.measure import Row, alternate, compare, single
from bench.peers import megatron, name_of, simulated_world
from mcore.parallel import (
    CudaRNGStatesTracker,
    FSDPDistributedIndex,
    ProcessGroups,
    get_batch_on_this_cp_rank,
)

_WORLDS = (8, 64, 512, 4096)
_SIZES: Any = {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "expt_tp": 1}
_PEER_NAMES = {"tp": "tensor_model", "cp": "context", "pp": "pipeline_model", "ep": "expert_model",
               "expt_tp": "expert_tensor"}  # fmt: skip
_PEER_SIZES = {f"{_PEER_NAMES[name]}_parallel_size": size for name, size in _SIZES.items()}
_GROUP_FIELDS = (
    *("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp"),
    *("dp", "dp_cp", "tp_dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp"),
)
_HYBRID = ("dp_outer", "dp_shard")
_SUBMESHES = ("tp", (*_HYBRID, "tp"), ("dp_shard", "tp"), _HYBRID, "dp_shard")
_FORK_TARGET = 5.0


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    with _suppress_output():
        core = name_of()
        yield from _compare_slices(core)
        yield _compare_forks(core)
        yield from _compare_groups(core)
        yield from _compare_index(name_of("megatron-fsdp"))


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress warnings and the peers' log lines between the rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Context-parallel slices


def _compare_slices(name: str) -> Iterator[Row]:
    peer = megatron("utils").get_batch_on_this_cp_rank
    for rows, length, cp_size in ((1, 4096, 4), (4, 4096, 8), (1, 131072, 8)):
        case = f"cp slice, 4 tensors [{rows}, {length}], cp {cp_size}"
        yield _compare_slice(case, peer, name, rows, length, cp_size, None, 1.5)
    length, cp_size = 4096, 4
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    case = f"cp slice, the same and a mask [1, 1, {length}, {length}], cp {cp_size}"
    yield _compare_slice(case, peer, name, 1, length, cp_size, mask, 1.0)


def _compare_slice(
    case: str, peer: Callable[..., Any], name: str, rows: int, length: int, cp_size: int,
    mask: torch.Tensor | None, target: float,
) -> Row:  # fmt: skip
    batch: dict[str, Any] = {
        "tokens": torch.randint(0, 50_000, (rows, length)),
        "labels": torch.randint(0, 50_000, (rows, length)),
        "loss_mask": torch.ones(rows, length),
        "attention_mask": mask,
        "position_ids": torch.arange(length).repeat(rows, 1),
    }

    def slice_ours() -> dict[str, Any]:
        return get_batch_on_this_cp_rank(batch, dist.group.WORLD)

    def slice_theirs() -> Any:
        return peer(dict(batch), dist.group.WORLD)  # it overwrites its argument

    differing = []
    for rank in range(cp_size):
        with simulated_world(cp_size, rank):
            ours, theirs = slice_ours(), slice_theirs()
            differing += [
                f"{key} on rank {rank}"
                for key in batch
                if not (ours[key] is theirs[key] is None or torch.equal(ours[key], theirs[key]))
            ]
    with simulated_world(cp_size, rank=1):
        return compare(
            case, slice_ours, name, slice_theirs, target,
            agreement=f"all tensors on {cp_size} ranks", difference=", ".join(differing),
            number=50 if mask is None else 10, repeats=15,
        )  # fmt: skip


# Random streams


def _compare_forks(name: str) -> Row:
    peer = megatron("tensor_parallel.random")
    if torch.cuda.is_available():
        return _compare_fork("rng fork, CUDA", peer, name, "cuda", _FORK_TARGET)
    generator = torch.default_generator
    state = generator.get_state()

    def read_and_write_twice() -> None:
        generator.set_state(generator.get_state())
        generator.set_state(state)
        generator.get_state()

    bare_us = single(read_and_write_twice, number=500) / 1e-6
    note = f"{bare_us:.1f} us of both are the generator's, on CUDA the aim is {_FORK_TARGET:g}"
    with _redirect_cuda_state(peer):
        return _compare_fork("rng fork, CPU", peer, name, "cpu", None, note)


def _compare_fork(
    case: str, peer: Any, name: str, device: str, target: float | None, note: str = ""
) -> Row:
    trackers = CudaRNGStatesTracker(device=device), peer.CudaRNGStatesTracker()
    for tracker in trackers:
        tracker.add("first", 1234)
        tracker.add("second", 99)
    is_same = torch.equal(*(_draw_in_forks(tracker, device) for tracker in trackers))
    ours, theirs = (partial(_fork_once, tracker) for tracker in trackers)
    return compare(
        case, ours, name, theirs, target, agreement="draws of two streams",
        difference="" if is_same else "other random numbers", number=500, repeats=15, note=note,
    )  # fmt: skip


def _draw_in_forks(tracker: Any, device: str) -> torch.Tensor:
    draws = []
    for stream in ("first", "second", "first"):
        with tracker.fork(stream):
            draws.append(torch.rand(5, device=device))
    return torch.cat(draws)


def _fork_once(tracker: Any) -> None:
    with tracker.fork("first"):
        pass


@contextmanager
def _redirect_cuda_state(peer: Any) -> Iterator[None]:
    """Have code for CUDA read, write and seed the CPU's default generator instead."""
    generator = torch.default_generator
    before = generator.get_state()

    def read(*_: Any, **__: Any) -> torch.Tensor:
        return generator.get_state()

    def write(state: torch.Tensor, *_: Any, **__: Any) -> None:
        generator.set_state(state)

    seed = generator.manual_seed
    try:
        with (
            patch.multiple(peer, _get_cuda_rng_state=read, _set_cuda_rng_state=write),
            patch.multiple(torch.cuda, get_rng_state=read, set_rng_state=write, manual_seed=seed),
        ):
            yield
    finally:
        generator.set_state(before)


# Process groups


def _compare_groups(name: str) -> Iterator[Row]:
    state, collection = megatron("parallel_state"), megatron("process_groups_config")
    ours, theirs = partial(ProcessGroups.from_sizes, **_SIZES), state.initialize_model_parallel
    theirs = partial(theirs, **_PEER_SIZES, create_gloo_process_groups=False)
    growth = _Growth()
    for world in _WORLDS:
        case = f"ProcessGroups.from_sizes, {world} ranks"
        difference = ""
        for rank in (0, world // 2 + 1, world - 1):
            with simulated_world(world, rank):
                theirs()
                found = collection.ProcessGroupCollection.use_mpu_process_groups()
                difference = difference or _find_different_group(ours(), found)
                state.destroy_model_parallel()
        if difference:
            yield Row.disagreement(case, name, difference)
            continue
        sides = [
            partial(_time_in_new_world, build, state.destroy_model_parallel, world)
            for build in (ours, theirs)
        ]
        ours_s, peer_s = map(min, alternate(sides, 3 if world > 1000 else 15))
        agreement = f"{len(_GROUP_FIELDS)} groups on 3 ranks"
        note = growth.describe(world, ours_s, peer_s)
        yield Row(case, ours_s, name, peer_s, agreement=agreement, note=note)


def _find_different_group(ours: ProcessGroups, theirs: Any) -> str:
    for field in _GROUP_FIELDS:
        mine, other = getattr(ours, field), getattr(theirs, field)
        ranks = [None if g is None else dist.get_process_group_ranks(g) for g in (mine, other)]
        if ranks[0] != ranks[1]:
            return f"{field}: {ranks[0]} against {ranks[1]}"
    return ""


def _time_in_new_world(build: Callable[[], Any], clean_up: Callable[[], Any], world: int) -> float:
    gc.collect()
    with simulated_world(world, world // 2):
        started_s = time.perf_counter()
        build()
        elapsed_s = time.perf_counter() - started_s
        clean_up()
    return elapsed_s


class _Growth:
    """The growth of both sides' times since the previous world."""

    def __init__(self) -> None:
        self._last: tuple[int, float, float] | None = None

    def describe(self, world: int, ours_s: float, peer_s: float) -> str:
        last, self._last = self._last, (world, ours_s, peer_s)
        if last is None:
            return ""
        return (
            f"{world // last[0]} times the ranks take {ours_s / last[1]:.1f} times as long, "
            f"peer {peer_s / last[2]:.1f}"
        )


# The FSDP index


def _compare_index(name: str) -> Iterator[Row]:
    peer: Any = import_module("megatron_fsdp.utils").FSDPDistributedIndex
    growth = _Growth()
    for world in _WORLDS:
        with simulated_world(world, world // 2 + 1):
            mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=(*_HYBRID, "tp"))
            group = mesh[_HYBRID]._flatten("hsdp").get_group()
            ours, theirs = (
                partial(_make_index, kind, mesh, group) for kind in (FSDPDistributedIndex, peer)
            )
            yield compare(
                f"FSDPDistributedIndex and its submeshes, {world} ranks", ours, name, theirs, 1.0,
                agreement=f"{len(_SUBMESHES)} submeshes, 3 groups, logical rank",
                difference=_describe_difference(ours(), theirs()),
                number=5, repeats=25, note=partial(growth.describe, world),
            )  # fmt: skip


def _make_index(
    kind: Callable[..., Any], mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[Any, Sequence[DeviceMesh]]:
    """Make a hybrid index and look up every submesh once."""
    index = kind(mesh, *_HYBRID[::-1], "tp", group, hsdp_outer_dp_shard=True)
    return index, [index.get_submesh(names) for names in _SUBMESHES]


def _describe_difference(
    ours: tuple[Any, Sequence[DeviceMesh]], theirs: tuple[Any, Sequence[DeviceMesh]]
) -> str:
    facts = []
    for index, submeshes in (ours, theirs):
        groups = (index.get_fsdp_group(), index.get_outer_fsdp_group(), index.get_dp_group())
        facts.append(
            {
                "submeshes": [(mesh.mesh_dim_names, mesh.mesh.tolist()) for mesh in submeshes],
                "groups": [dist.get_process_group_ranks(group) for group in groups],
                "logical rank": index.get_logical_hybrid_fsdp_rank(),
            }
        )
    return ", ".join(name for name in facts[0] if facts[0][name] != facts[1][name])
