"""Hashes of replicas against megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from bench.measure import Row, compare, cpu_seconds
from bench.peers import megatron, megatron_groups, name_of, simulated_world
from mcore.parallel.replicas import check_param_hashes_across_dp_replicas, param_hashes

_REPEATS = 21


def compare_replicas() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    peer, name = megatron("utils").check_param_hashes_across_dp_replicas, name_of()
    # The peer moves its digests to a CUDA device, which this makes the CPU.
    on_the_cpu = patch.multiple(torch.Tensor, cuda=lambda self, *args, **kwargs: self)
    with on_the_cpu, simulated_world(2), megatron_groups():
        yield _compare_hashing(peer, name, torch.bfloat16, 10)
        yield _compare_hashing(peer, name, torch.float32, 4)


def _compare_hashing(
    peer: Callable[..., bool], name: str, dtype: torch.dtype, target: float
) -> Row:
    """The whole check of 256 MiB in one process that plays one of two ranks."""
    model = [_make_model(dtype, 256 << 20)]
    theirs = _record_digests(peer, model)
    is_same = list(param_hashes(model, bit_exact=False).values()) == theirs
    ours = partial(check_param_hashes_across_dp_replicas, model, True, dp_group=dist.group.WORLD)
    calls = ours, partial(peer, model, True)
    ours_cpu_s, peer_cpu_s = map(cpu_seconds, calls)
    return compare(
        f"check 256 MiB of {dtype}, raw bytes", calls[0], name, calls[1], target,
        agreement=f"{len(theirs)} SHA-1 with bit_exact=False",
        difference="" if is_same else f"{len(theirs)} digests of the values as float32",
        repeats=_REPEATS, note=f"{ours_cpu_s:.3g} s against {peer_cpu_s:.3g} s of CPU time",
    )  # fmt: skip


def _make_model(dtype: torch.dtype, num_bytes: int) -> nn.Module:
    """Sixteen equal matrices and a vector."""
    rows = num_bytes // (16 * 4096 * dtype.itemsize)
    shapes = [*[(rows, 4096)] * 16, (4096,)]
    return nn.ParameterList(
        nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False) for shape in shapes
    )


def _record_digests(peer: Callable[..., bool], model: list[nn.Module]) -> list[str]:
    """The SHA-1 digests that the peer sends to the other ranks."""
    sent: list[torch.Tensor] = []
    all_gather = dist.all_gather

    def record(parts: list[torch.Tensor], own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(own.clone())
        return all_gather(parts, own, *args, **kwargs)

    with patch.multiple(dist, all_gather=record):
        peer(model, True)
    return [bytes(row.tolist()).hex() for digests in sent for row in digests]
