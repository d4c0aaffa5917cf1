"""Hashes of replicas against megatron-core, and deferred weight gradients against a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from bench.measure import Row, compare, cpu_seconds, paired
from bench.peers import megatron, megatron_groups, name_of, simulated_world
from mcore.parallel.replicas import check_param_hashes_across_dp_replicas, param_hashes
from mcore.parallel.torch_compat import all_gather_single
from mcore.parallel.wgrad import drain_embedding_wgrad_compute
from rank_testing import run_ranks

_MANY_RANKS, _MANY_PARAMS = 4096, 2000
_REPEATS = 21


def compare_replicas() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    peer, name = megatron("utils").check_param_hashes_across_dp_replicas, name_of()
    # The peer moves its digests to a CUDA device, which this makes the CPU.
    with patch.multiple(torch.Tensor, cuda=lambda self, *args, **kwargs: self):
        with simulated_world(2), megatron_groups():
            yield _compare_hashing(peer, name, torch.bfloat16, 10)
            yield _compare_hashing(peer, name, torch.float32, 4)
        with simulated_world(_MANY_RANKS), megatron_groups():
            yield _compare_exchange(peer, name)
    for num in (1, 8):
        yield _compare_drain(num)


def _check(model: list[nn.Module]) -> bool:
    return check_param_hashes_across_dp_replicas(model, True, dp_group=dist.group.WORLD)


def _compare_hashing(
    peer: Callable[..., bool], name: str, dtype: torch.dtype, target: float
) -> Row:
    """The whole check of 256 MiB in one process that plays one of two ranks."""
    model = [_make_model(dtype, 256 << 20)]
    theirs = _record_digests(peer, model)
    is_same = list(param_hashes(model, bit_exact=False).values()) == theirs
    calls = partial(_check, model), partial(peer, model, True)
    ours_cpu_s, peer_cpu_s = map(cpu_seconds, calls)
    return compare(
        f"check 256 MiB of {dtype}, raw bytes", calls[0], name, calls[1], target,
        agreement=f"{len(theirs)} SHA-1 with bit_exact=False",
        difference="" if is_same else f"{len(theirs)} digests of the values as float32",
        repeats=_REPEATS, note=f"{ours_cpu_s:.3g} s against {peer_cpu_s:.3g} s of CPU time",
    )  # fmt: skip


def _compare_exchange(peer: Callable[..., bool], name: str) -> Row:
    """The cost of the exchange at many ranks, on one of them."""
    model: list[nn.Module] = [
        nn.ParameterList(nn.Parameter(torch.full((), float(i))) for i in range(_MANY_PARAMS))
    ]
    agreed = _check(model) and peer(model, True)
    return compare(
        f"check {_MANY_PARAMS} scalars at {_MANY_RANKS} simulated ranks", partial(_check, model),
        name, partial(peer, model, True), agreement="verdict",
        difference="" if agreed else "a replica of the same process differs", repeats=5,
    )  # fmt: skip


def _compare_drain(num: int) -> Row:
    """Deferred pairs on two gloo ranks against a gather and a GEMM in turn."""
    measured = run_ranks(_time_drain, 2, num, timeout_s=600)
    ours_s, peer_s, error = (max(column) for column in zip(*measured, strict=True))
    case = f"drain {num} micro-batches of 1024 tokens, 2 ranks"
    name = "all-gather and addmm_ in turn"
    if not error <= 1e-3:
        return Row.disagreement(case, name, f"sums differ by {error}")
    target = 1.0 if num > 1 else None  # a single micro-batch has nothing to overlap
    return Row(case, ours_s, name, peer_s, target, "sum of the weight gradient")


def _time_drain(num: int) -> tuple[float, float, float]:
    """Seconds of both on one rank, and the difference of the sums."""
    length, hidden, vocab = 1024, 1024, 2048
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(length // 2, 1, hidden, generator=generator) for _ in range(num)]
    grads = [torch.randn(length, 1, vocab, generator=generator) for _ in range(num)]
    config = SimpleNamespace(sequence_parallel=True)
    weight: Any = nn.Parameter(torch.empty(0))
    weight.main_grad = torch.zeros(vocab, hidden)
    total, full = torch.zeros(vocab, hidden), torch.empty(length, 1, hidden)

    def ours() -> None:
        drain_embedding_wgrad_compute(config, [*inputs], [*grads], weight, dist.group.WORLD)

    def in_turn() -> None:
        for part, grad in zip(inputs, grads, strict=True):
            all_gather_single(full, part, dist.group.WORLD)
            total.addmm_(grad.view(length, vocab).t(), full.view(length, hidden))

    ours()
    in_turn()
    difference = float((weight.main_grad - total).abs().max())
    return *paired(ours, in_turn, number=1, repeats=_REPEATS), difference


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
