"""``mcore.parallel`` against megatron-core and megatron-fsdp, on ranks that one process plays.

- torch's fake process group simulates the ranks.
- On a CPU the peer's fork reads and writes the CPU's generator in place of CUDA's.
- A cp slice and an index check more than the peers do: lengths of all tensors; that all ranks ask
  for the same.
"""

from __future__ import annotations

import gc
import importlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.measure import Row, paired, single
from mcore.parallel import (
    CudaRNGStatesTracker,
    FSDPDistributedIndex,
    ProcessGroups,
    get_batch_on_this_cp_rank,
)

_WORLDS = (8, 64, 512, 4096)
_SIZES: Any = {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "expt_tp": 1}
_GROUP_FIELDS = (
    *("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp"),
    *("dp", "dp_cp", "tp_dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp"),
)
_HYBRID = ("dp_outer", "dp_shard")
_SUBMESHES = ("tp", (*_HYBRID, "tp"), ("dp_shard", "tp"), _HYBRID, "dp_shard")
_SLICE_TARGET, _MASK_TARGET, _FORK_TARGET, _INDEX_TARGET = 1.5, 1.0, 5.0, 1.0


def run() -> Iterable[Row]:
    """Yield the rows; the checks of agreement come before each timing."""
    with _quiet():
        core = f"megatron-core {_version_of('megatron.core', 'megatron-core')}"
        yield from _slicing(core)
        yield from _rng_fork(core)
        yield from _groups(core)
        fsdp = f"megatron-fsdp {_version_of('megatron_fsdp', 'megatron-fsdp')}"
        yield from _index(fsdp)


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither warnings nor the peers' log lines between the rows."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _version_of(module: str, distribution: str) -> str:
    """Import a peer, so that a missing one is reported as missing, and return its version."""
    importlib.import_module(module)
    return version(distribution)


@contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a world whose collectives return at once; torch keeps it for its own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Context-parallel slices


def _slicing(name: str) -> Iterator[Row]:
    peer: Any = importlib.import_module("megatron.core.utils").get_batch_on_this_cp_rank
    for rows, length, cp_size in ((1, 4096, 4), (4, 4096, 8), (1, 131072, 8)):
        batch = _batch(rows, length)
        case = f"cp slice, 4 tensors [{rows}, {length}], cp {cp_size}"
        yield _slice_row(case, batch, cp_size, peer, name, target=_SLICE_TARGET, number=50)
    length, cp_size = 4096, 4
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    batch = {**_batch(1, length), "attention_mask": mask}
    case = f"cp slice, the same and a mask [1, 1, {length}, {length}], cp {cp_size}"
    yield _slice_row(case, batch, cp_size, peer, name, target=_MASK_TARGET, number=10)


def _batch(rows: int, length: int) -> dict[str, Any]:
    positions = torch.arange(length).repeat(rows, 1)
    return {
        "tokens": torch.randint(0, 50_000, (rows, length)),
        "labels": torch.randint(0, 50_000, (rows, length)),
        "loss_mask": torch.ones(rows, length),
        "attention_mask": None,
        "position_ids": positions,
    }


def _slice_row(
    case: str,
    batch: dict[str, Any],
    cp_size: int,
    peer: Callable[..., Any],
    name: str,
    *,
    target: float,
    number: int,
) -> Row:
    for rank in range(cp_size):
        with _world(rank, cp_size):
            group = dist.group.WORLD
            ours = get_batch_on_this_cp_rank(batch, group)
            theirs = peer(dict(batch), group)
            for key in batch:
                same = ours[key] is theirs[key] is None or torch.equal(ours[key], theirs[key])
                if not same:
                    return Row.disagreement(case, name, f"{key} on rank {rank}")
    with _world(1, cp_size):
        group = dist.group.WORLD
        ours_s, peer_s = paired(
            lambda: get_batch_on_this_cp_rank(batch, group),
            lambda: peer(dict(batch), group),  # it overwrites its argument
            number=number,
            repeats=15,
        )
    return Row(
        case,
        ours_s,
        name,
        peer_s,
        target=target,
        agreement=f"all tensors on {cp_size} ranks",
    )


# Random streams


def _rng_fork(name: str) -> Iterator[Row]:
    peer: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if torch.cuda.is_available():
        yield _fork_row(
            "rng fork, CUDA", peer.CudaRNGStatesTracker(), name, "cuda", _FORK_TARGET, ""
        )
        return
    generator = torch.default_generator
    state = generator.get_state()

    def read_and_write_twice() -> None:
        generator.set_state(generator.get_state())
        generator.set_state(state)
        generator.get_state()

    bare_s = single(read_and_write_twice, number=500)
    note = (
        f"{bare_s / 1e-6:.1f} us of both are the generator's; on CUDA the aim is {_FORK_TARGET:g}"
    )
    with _cuda_state_on_the_cpu(peer):
        yield _fork_row("rng fork, CPU", peer.CudaRNGStatesTracker(), name, "cpu", None, note)


def _fork_row(case: str, peer: Any, name: str, device: str, target: float | None, note: str) -> Row:
    ours = CudaRNGStatesTracker(device=device)
    for tracker in (ours, peer):
        tracker.add("first", 1234)
        tracker.add("second", 99)
    drawn = [_forked_draws(tracker, device) for tracker in (ours, peer)]
    if not torch.equal(*drawn):
        return Row.disagreement(case, name, "other random numbers")
    ours_s, peer_s = paired(
        lambda: _empty_fork(ours), lambda: _empty_fork(peer), number=500, repeats=15
    )
    return Row(
        case, ours_s, name, peer_s, target=target, agreement="draws of two streams", note=note
    )


def _forked_draws(tracker: Any, device: str) -> torch.Tensor:
    draws = []
    for stream in ("first", "second", "first"):
        with tracker.fork(stream):
            draws.append(torch.rand(5, device=device))
    return torch.cat(draws)


def _empty_fork(tracker: Any) -> None:
    with tracker.fork("first"):
        pass


@contextmanager
def _cuda_state_on_the_cpu(peer: Any) -> Iterator[None]:
    """Let code for CUDA read, write and seed the CPU's default generator instead."""
    generator = torch.default_generator
    before = generator.get_state()

    def read(*_: Any, **__: Any) -> torch.Tensor:
        return generator.get_state()

    def write(state: torch.Tensor, *_: Any, **__: Any) -> None:
        generator.set_state(state)

    replaced = [
        (peer, "_get_cuda_rng_state", read),
        (peer, "_set_cuda_rng_state", write),
        (torch.cuda, "get_rng_state", read),
        (torch.cuda, "set_rng_state", write),
        (torch.cuda, "manual_seed", generator.manual_seed),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
        generator.set_state(before)


# Process groups


def _groups(name: str) -> Iterator[Row]:
    state: Any = importlib.import_module("megatron.core.parallel_state")
    collection: Any = importlib.import_module("megatron.core.process_groups_config")

    def theirs() -> None:
        state.initialize_model_parallel(
            tensor_model_parallel_size=_SIZES["tp"],
            context_parallel_size=_SIZES["cp"],
            pipeline_model_parallel_size=_SIZES["pp"],
            expert_model_parallel_size=_SIZES["ep"],
            expert_tensor_parallel_size=_SIZES["expt_tp"],
            create_gloo_process_groups=False,
        )

    growth = _Growth()
    for world in _WORLDS:
        case = f"ProcessGroups.from_sizes, {world} ranks"
        difference = ""
        for rank in (0, world // 2 + 1, world - 1):
            with _world(rank, world):
                theirs()
                found = collection.ProcessGroupCollection.use_mpu_process_groups()
                difference = difference or _different_groups(
                    ProcessGroups.from_sizes(**_SIZES), found
                )
                state.destroy_model_parallel()
        if difference:
            yield Row.disagreement(case, name, difference)
            continue
        ours_s, peer_s = _paired_in_new_worlds(
            lambda: ProcessGroups.from_sizes(**_SIZES), theirs, state.destroy_model_parallel, world
        )
        yield Row(
            case,
            ours_s,
            name,
            peer_s,
            agreement=f"{len(_GROUP_FIELDS)} groups on 3 ranks",
            note=growth.since_last(world, ours_s, peer_s),
        )


def _different_groups(ours: ProcessGroups, theirs: Any) -> str:
    for field in _GROUP_FIELDS:
        mine, other = getattr(ours, field), getattr(theirs, field)
        ranks = [None if g is None else dist.get_process_group_ranks(g) for g in (mine, other)]
        if ranks[0] != ranks[1]:
            return f"{field}: {ranks[0]} against {ranks[1]}"
    return ""


def _paired_in_new_worlds(
    ours: Callable[[], Any], peer: Callable[[], Any], clean_up: Callable[[], Any], world: int
) -> tuple[float, float]:
    """Seconds of one call in a world of its own, the minimum of alternating repeats."""
    best = [math.inf, math.inf]
    for _ in range(3 if world > 1000 else 15):
        for side, build in enumerate((ours, peer)):
            gc.collect()
            with _world(world // 2, world):
                started_s = time.perf_counter()
                build()
                best[side] = min(best[side], time.perf_counter() - started_s)
                clean_up()
    return best[0], best[1]


class _Growth:
    """Tells by how much both sides' times grew since the previous world."""

    def __init__(self) -> None:
        self._last: tuple[int, float, float] | None = None

    def since_last(self, world: int, ours_s: float, peer_s: float) -> str:
        last, self._last = self._last, (world, ours_s, peer_s)
        if last is None:
            return ""
        return (
            f"{world // last[0]} times the ranks take {ours_s / last[1]:.1f} times as long, "
            f"peer {peer_s / last[2]:.1f}"
        )


# The FSDP index


def _index(name: str) -> Iterator[Row]:
    peer: Any = importlib.import_module("megatron_fsdp.utils").FSDPDistributedIndex
    growth = _Growth()
    for world in _WORLDS:
        case = f"FSDPDistributedIndex and its submeshes, {world} ranks"
        with _world(world // 2 + 1, world):
            mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=(*_HYBRID, "tp"))
            group = mesh[_HYBRID]._flatten("hsdp").get_group()
            difference = _different_indices(
                _indexed(FSDPDistributedIndex, mesh, group), _indexed(peer, mesh, group)
            )
            if difference:
                yield Row.disagreement(case, name, difference)
                continue
            ours_s, peer_s = paired(
                partial(_indexed, FSDPDistributedIndex, mesh, group),
                partial(_indexed, peer, mesh, group),
                number=5,
                repeats=25,
            )
        yield Row(
            case,
            ours_s,
            name,
            peer_s,
            target=_INDEX_TARGET,
            agreement=f"{len(_SUBMESHES)} submeshes, 3 groups, logical rank",
            note=growth.since_last(world, ours_s, peer_s),
        )


def _indexed(
    kind: Callable[..., Any], mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[Any, Sequence[DeviceMesh]]:
    """Make a hybrid index and take every submesh once."""
    index = kind(mesh, *_HYBRID[::-1], "tp", group, hsdp_outer_dp_shard=True)
    return index, [index.get_submesh(names) for names in _SUBMESHES]


def _different_indices(
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
