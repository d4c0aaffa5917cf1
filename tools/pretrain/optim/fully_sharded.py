"""Fully sharded data parallelism: parameters, gradients and moments over the dp x cp ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mcore.modules import MegatronModule
from mcore.parallel import FSDPDistributedIndex, ProcessGroups, get_pg_size, resolve_submesh
from mcore.tensor import to_local_if_dtensor
from pretrain.model.experts import Experts, is_expert
from pretrain.model.gpt import TransformerLayer
from pretrain.model.stages import chunks_of, copy_marks, is_shared_embedding
from pretrain.model.tensor_parallel import has_partial_gradient, sum_partial_gradients
from pretrain.optim.adamw import AdamW, TrainingOptimizer, clip_to_norm
from pretrain.settings import Settings

_SHARD, _OUTER, _TP = "dp_shard", "dp_outer", "tp"


def sharding_index(groups: ProcessGroups, outer: int) -> FSDPDistributedIndex:
    """The index over the job's mesh: ``outer`` replicas, each sharded over dp x cp / outer ranks.

    Experts are sharded over dp x cp / ep / outer ranks. Collective on the world group.
    ``groups.dp_cp`` and ``groups.expt_dp`` already have their ranks in outer-major order.
    """
    if groups.dense_mesh is None or groups.expert_mesh is None:
        raise ValueError("the process groups have no mesh: make them with from_sizes")
    mesh = _split_dimension(groups.dense_mesh, "dp", outer, "dp_inner")
    resolve_submesh(mesh, ("dp_inner", "cp"))._flatten(_SHARD)
    experts = _split_dimension(groups.expert_mesh, "expt_dp", outer, _SHARD)
    if outer == 1:
        return FSDPDistributedIndex(mesh, _SHARD, tp_dim=_TP, expt_device_mesh=experts)
    return FSDPDistributedIndex(
        mesh, _SHARD, _OUTER, _TP, hybrid_fsdp_group=groups.dp_cp, expt_device_mesh=experts,
        hybrid_fsdp_expt_group=groups.expt_dp,
    )  # fmt: skip


def _split_dimension(mesh: DeviceMesh, dim: str, outer: int, inner: str) -> DeviceMesh:
    """The mesh with one dimension split in two. torch 2.11 accepts only the dimension's number."""
    place = (mesh.mesh_dim_names or ()).index(dim)
    return mesh._unflatten(place, (outer, mesh.size(place) // outer), (_OUTER, inner))


def shard_model(model: MegatronModule, index: FSDPDistributedIndex, *, bf16: bool) -> None:
    """Make every parameter a DTensor over the data-parallel ranks, one layer at a time."""
    dims = (_OUTER, _SHARD) if index.use_hybrid_fsdp else _SHARD
    mesh = index.get_submesh(dims)
    expert_mesh = index.get_submesh(dims, is_expert_parallel=True)
    low = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    at_the_end = dataclasses.replace(policy, output_dtype=torch.float32 if bf16 else None)
    whole = dict(model.named_parameters())
    for module in model.modules():
        if isinstance(module, Experts):
            fully_shard(module, mesh=expert_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    for chunk in chunks_of(model):
        fully_shard(chunk, mesh=mesh, mp_policy=at_the_end if chunk.stage.is_last else policy)
    for name, param in model.named_parameters():  # fully_shard has replaced the parameters
        copy_marks(param, whole[name])


class FullyShardedOptimizer(TrainingOptimizer):
    """Updates the fp32 shards of a rank. FSDP reduces their gradients.

    All ranks build it over their shards of the same model, after ``shard_model``, and call its
    methods together. ``dp_cp`` ranks average the loss, ``tp`` ranks share the gradient norm.
    """

    def __init__(
        self, model: MegatronModule, groups: ProcessGroups, index: FSDPDistributedIndex,
        settings: Settings,
    ) -> None:  # fmt: skip
        self.groups = groups
        self.bf16 = settings.bf16
        self.index = index
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.adamw = AdamW(self.params, settings)
        self._accumulated = 0

    def accumulate_gradients(self, *, is_whole: bool = True) -> None:
        """Count a micro-batch: FSDP adds its reduced gradients to the earlier ones."""
        self._accumulated += is_whole

    def reduce_gradients(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Average over the micro-batches. FSDP has averaged the gradients over ``dp_cp``.

        FSDP has averaged the gradients of experts, which include the tokens of all ``ep`` ranks,
        over ``expt_dp`` only. One all-reduce of the loss over ``dp_cp``. With sequence parallelism
        one of the partial gradients over ``tp``. If two stages share the embedding, one of its
        gradient over ``embd``.
        """
        gradients = list(self._list_gradients())
        torch._foreach_div_([grad for _, grad in gradients], self._accumulated)
        for param, grad in gradients:
            if is_expert(param):
                grad /= get_pg_size(self.groups.ep)
        sum_partial_gradients(
            [grad for param, grad in gradients if has_partial_gradient(param)], self.groups.tp
        )
        sum_partial_gradients(
            [grad for param, grad in gradients if is_shared_embedding(param)], self.groups.embd
        )
        loss = loss_sum.detach().clone()
        if get_pg_size(self.groups.dp_cp) > 1:
            dist.all_reduce(loss, group=self.groups.dp_cp)
        loss /= self._accumulated * get_pg_size(self.groups.dp_cp)
        self._accumulated = 0
        return loss

    def clip_gradients(self, limit: float) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``limit``.

        One all-reduce over the shards' group, one over ``pp`` and one over ``tp``. Outer replicas
        are equal.
        """
        return clip_to_norm(
            list(self._list_gradients()),
            limit,
            tp_group=self.groups.tp,
            shard_groups=[self.index.get_fsdp_group(), self.groups.pp],
            expert_groups=[
                self.index.get_fsdp_group(is_expert_parallel=True),
                self.groups.tp_ep_pp,
            ],
        )

    def list_states(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The moments of the parameter at a place, and with bf16 its fp32 shard.

        So the entries equal those of layouts without FSDP: the fp32 weights are main weights, next
        to the model's parameters, which the checkpoint rounds.
        """
        if self.bf16:
            yield "main", self.params[place].detach()
        yield from self.adamw.moments(self.params[place])

    def _list_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for param in self.params:
            if param.grad is not None:
                yield param, to_local_if_dtensor(param.grad)
