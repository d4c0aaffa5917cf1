"""A default device that the tensors are not on changes no result: nothing is made there unasked."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import init_device_mesh

import mcore.parallel as package
import mcore.parallel.checkpoint as checkpoint
from mcore.parallel import FSDPDistributedIndex, ProcessGroups
from rank_testing import run_ranks

# What is seen in the names of the modules that they come from.
_NOT_CALLED = {"__version__", "ProcessGroupCollection"}


def _of_groups() -> Iterator[object]:
    groups = ProcessGroups.from_sizes(tp=2)
    yield package.get_pg_size(groups.tp), package.get_pg_rank(groups.tp)
    yield package.get_pg_src_rank(groups.tp)
    yield groups is not ProcessGroups.from_sizes(cp=2, hcp_sizes=[2, 1])
    with package.use_process_groups(groups):
        yield package.get_default_process_groups() is groups
        yield package.get_tensor_model_parallel_group_if_none(None) is groups.tp
    package.set_default_process_groups(groups)
    package.clear_default_process_groups()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    yield package.get_mesh_names(mesh), package.contains_submesh(mesh, "dp")
    yield package.resolve_submesh(mesh, "dp").size()
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    yield index.get_submesh("dp").size(), package.using_tensor_parallel(index)


def _of_regions() -> Iterator[object]:
    group = dist.group.WORLD
    for region in (
        package.copy_to_tensor_model_parallel_region,
        package.reduce_from_tensor_model_parallel_region,
        package.scatter_to_tensor_model_parallel_region,
        package.gather_from_tensor_model_parallel_region,
        package.scatter_to_sequence_parallel_region,
        package.gather_from_sequence_parallel_region,
        package.reduce_scatter_to_sequence_parallel_region,
    ):
        given = torch.arange(8.0, device="cpu").view(4, 2).requires_grad_()
        result = region(given * 2, group=group)
        result.square().sum().backward()
        yield result.detach(), given.grad
    given = torch.arange(8.0, device="cpu").view(4, 2)
    yield package.all_to_all(given, group)
    yield package.all_to_all(given, group, input_split_sizes=[1, 3])
    targets = torch.tensor([1, 3, 0, 2], device="cpu")
    yield package.vocab_parallel_cross_entropy(given, targets, tp_group=group)


def _of_sequences() -> Iterator[object]:
    group = dist.group.WORLD
    batch = {"tokens": torch.arange(16, device="cpu").view(1, 16)}
    yield package.get_batch_on_this_cp_rank(dict(batch), group)["tokens"]
    places = (0, group, 1, dist.get_rank(), 1, 16, False, 2, True)
    yield package.get_batch_on_this_tp_rank(
        {**batch, "position_ids": batch["tokens"]}, False, False, False, *places
    )["tokens"]
    batch["cu_seqlens"] = torch.tensor([[0, 8, 16]], dtype=torch.int32, device="cpu")
    yield package.get_batch_on_this_cp_rank(dict(batch), group)["tokens"]
    yield package.flatten_batch_for_packed_sequences(dict(batch))["cu_seqlens"]
    for borders in (None, [0, 8, 16], torch.tensor([0, 8, 16], device="cpu")):
        yield package.cp_zigzag_index(16, 2, dist.get_rank(), cu_seqlens=borders, device="cpu")
    halves = [package.cp_zigzag_index(16, 2, rank, device="cpu") for rank in range(2)]
    yield package.cp_unzigzag(halves, 0)


def _of_numbers() -> Iterator[object]:
    group, rank = dist.group.WORLD, dist.get_rank()
    yield package.logical_and_across_model_parallel_group(rank == 0, group)
    yield package.reduce_max_stat_across_model_parallel_group(float(rank), group)
    yield package.reduce_max_stat_across_model_parallel_group(None, group)
    yield package.reduce_max_memory_across_pp_group({"bytes": rank}, group)
    yield package.reduce_step_stats({"a": 1.5, "b": None}, {"c": True}, group)


def _of_parameters() -> Iterator[object]:
    group, rank = dist.group.WORLD, dist.get_rank()
    weight = torch.nn.Parameter(torch.ones(4, 2, device="cpu"))
    package.set_tensor_model_parallel_attributes(weight, True, 0)
    other = torch.nn.Parameter(torch.ones(4, 2, device="cpu"))
    package.copy_tensor_model_parallel_attributes(other, weight)
    yield package.is_mcore_tensor_model_parallel(other)
    yield package.is_mcore_tensor_parallel_duplicated(other)
    yield package.get_mcore_tensor_parallel_partition_dim(other)
    yield package.param_is_not_tensor_parallel_duplicate(other, group)
    model = torch.nn.Module()
    model.weight, model.narrow = weight, torch.nn.Parameter(other.detach().bfloat16())
    for options in ({}, {"cross_check": True}, {"bit_exact": False}):
        yield package.check_param_hashes_across_dp_replicas(model, dp_group=group, **options)
    with torch.no_grad():
        weight[0, 0] = rank
    yield package.check_param_hashes_across_dp_replicas(model, dp_group=group)
    if rank:
        model.more = torch.nn.Parameter(torch.ones(1, device="cpu"))
    try:
        package.check_param_hashes_across_dp_replicas(model, dp_group=group)
    except ValueError as error:
        yield str(error)


def _of_gradients() -> Iterator[object]:
    group = dist.group.WORLD
    grad = torch.arange(12.0, device="cpu").view(2, 2, 3)
    yield package.prepare_input_tensors_for_wgrad_compute(grad, grad + 1)
    weight: Any = torch.nn.Parameter(torch.zeros(3, 2, device="cpu"))
    weight.main_grad = torch.zeros(3, 2, device="cpu")
    for sequence_parallel in (False, True):
        inputs = torch.ones((2 if sequence_parallel else 4), 1, 2, device="cpu")
        config = SimpleNamespace(sequence_parallel=sequence_parallel)
        grads = torch.ones(4, 1, 3, device="cpu")
        package.drain_embedding_wgrad_compute(config, [inputs], [grads], weight, group)
        yield weight.main_grad.clone()


def _of_random_streams() -> Iterator[object]:
    package.initialize_rng_tracker(force_reset=True)
    package.model_parallel_cuda_manual_seed(3, tp_rank=dist.get_rank(), ep_rank=0, etp_rank=0)
    tracker = package.get_cuda_rng_tracker()
    with tracker.fork():
        yield torch.rand(3, device="cpu")
    states = tracker.get_states()
    with tracker.fork():
        yield torch.rand(3, device="cpu")
    tracker.set_states(states)
    with tracker.fork():
        yield torch.rand(3, device="cpu")
    yield isinstance(tracker, package.CudaRNGStatesTracker)
    given = torch.ones(4, device="cpu", requires_grad=True)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return x * torch.rand(4, device="cpu")

    yield package.checkpoint_activations(noisy, True, given, tp_group=dist.group.WORLD)
    again = package.replay_rng_streams(noisy)
    yield again(given), again(given)
    yield torch.utils.checkpoint.checkpoint(
        noisy, given, use_reentrant=False, context_fn=package.checkpoint_context_fn
    )


def _of_checkpoints(folder: str) -> Iterator[object]:
    rank = dist.get_rank()

    def state(value: float) -> dict[str, Any]:
        made = torch.full((2, 3), value + rank, device="cpu")
        return {
            "tp": package.make_tp_sharded_tensor_for_checkpoint(
                made, "tp", 0, tp_group=dist.group.WORLD, dp_cp_group=None
            ),
            "whole": package.make_sharded_tensor_for_checkpoint(
                torch.full((3,), value, device="cpu"), "whole", replica_id=rank
            ),
            "step": 7,
        }

    checkpoint.save_sharded_state_dict(state(5.0), folder)
    targets = state(0.0)
    for name in ("tp", "whole"):
        loaded = checkpoint.load_sharded_state_dict(targets, folder)
        yield loaded["tp"], loaded["whole"]
        targets[name] = targets[name].without_data()


_USES: list[Callable[[], Iterator[object]]] = [
    _of_groups, _of_regions, _of_sequences, _of_numbers, _of_parameters, _of_gradients,
    _of_random_streams,
]  # fmt: skip


def _both_ways(folder: str) -> dict[str, tuple[list[Any], list[Any]]]:
    found = {}
    for name, plain, on_meta in (
        *((use.__name__, use, use) for use in _USES),
        (
            "checkpoints",
            partial(_of_checkpoints, f"{folder}/a"),
            partial(_of_checkpoints, f"{folder}/b"),
        ),
    ):
        expected = list(plain())
        with torch.device("meta"):  # what torch.set_default_device does
            found[name] = expected, list(on_meta())
    return found


def test_results_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    for found in run_ranks(_both_ways, 2, str(tmp_path)):
        for name, (expected, on_meta) in found.items():
            assert repr(on_meta) == repr(expected), name
            assert "meta" not in repr(on_meta), name


def test_every_public_function_is_called() -> None:
    source = inspect.getsource(sys.modules[__name__])
    uses = source[source.index("def _of_groups") :]
    assert [n for n in package.__all__ if n not in uses and n not in _NOT_CALLED] == []
