"""Tensor-parallel building blocks: linears split by column and by row, and a split embedding.

Sequence parallelism splits the activations between them along the sequence without more
communication: an all-reduce becomes a gather and a reduce-scatter (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore.modules import MegatronModule, TransformerConfig
from mcore.parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_pg_rank,
    get_pg_size,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from mcore.parallel.checkpoint import make_sharded_tensors_for_checkpoint
from pretrain.model.configuration import ModelConfig
from pretrain.model.randomness import Init, ParameterInit, inner_init

Offsets = Sequence[tuple[int, int, int]]
_MARK = "sequence_parallel"


class TensorParallelModule(MegatronModule):
    """A module with sharded parameters.

    ``shard_axes`` maps their names to the sharded axis. ``padded`` names the parameters with a
    global length that depends on the layout, because rows pad the last rank.
    """

    shard_axes: ClassVar[dict[str, int]] = {}
    padded: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: TransformerConfig, init: ParameterInit) -> None:
        super().__init__(config)
        self.tp_group = init.tp_group
        self.sequence_parallel = config.sequence_parallel

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe each slice by its place in the whole tensor."""
        sharded = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, self.shard_axes, tuple(sharded_offsets),
            tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip
        for name in self.padded:
            sharded[prefix + name].allow_shape_mismatch = True
        return dict(sharded)


class _SplitLinear(TensorParallelModule):
    """The weight ``[out, in]`` and the bias of a linear, split along ``shard_axes``."""

    def __init__(
        self, config: TransformerConfig, init: ParameterInit, name: str, sizes: tuple[int, int],
        *, weight_init: Init,
    ) -> None:  # fmt: skip
        super().__init__(config, init)
        shape, zeros = sizes[::-1], torch.nn.init.zeros_
        axes = self.shard_axes
        self.weight = init.shard(f"{name}.weight", shape, weight_init, axis=axes["weight"])
        self.bias = init.shard(f"{name}.bias", shape[:1], zeros, axis=axes.get("bias"))


class ColumnParallelLinear(_SplitLinear):
    """``[s, b, in]`` equal on all ranks to this rank's ``[s, b, out / tp]``.

    Forward has no communication. Backward sums the input gradient over the tp group. With sequence
    parallelism the input is ``[s / tp, b, in]``: forward gathers it, backward reduce-scatters.
    """

    shard_axes: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, in]`` to ``[s, b, out / tp]``."""
        hidden = enter_split_layers(hidden, self.tp_group, sequence_parallel=self.sequence_parallel)
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(_SplitLinear):
    """This rank's ``[s, b, in / tp]`` to ``[s, b, out]`` equal on all ranks.

    Forward sums over the tp group. Backward has no communication. The bias is added once. With
    sequence parallelism the output is ``[s / tp, b, out]``: forward reduce-scatters, backward
    gathers.
    """

    shard_axes: ClassVar = {"weight": 1}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sequence_parallel:
            mark_partial_gradients([self.bias])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, in / tp]`` to ``[s, b, out]``."""
        if get_pg_size(self.tp_group) == 1:
            return F.linear(hidden, self.weight, self.bias)
        partial = F.linear(hidden, self.weight)
        whole = leave_split_layers(partial, self.tp_group, sequence_parallel=self.sequence_parallel)
        return whole + self.bias


class VocabParallelTable(TensorParallelModule):
    """A vector for each token id: an embedding, or the weight of an output head.

    The rows of the table are split over the tp group.
    """

    shard_axes: ClassVar = {"weight": 0}
    padded: ClassVar = ("weight",)

    def __init__(self, config: ModelConfig, init: ParameterInit, name: str) -> None:
        super().__init__(config, init)
        shape = (config.vocabulary_size, config.hidden_size)
        self.weight = init.shard(f"{name}.weight", shape, inner_init(config), axis=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[s, b]`` ids to ``[s, b, h]`` vectors, or this rank's ``[s / tp, b, h]`` of them."""
        if get_pg_size(self.tp_group) == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - get_pg_rank(self.tp_group) * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        vectors = vectors.masked_fill(elsewhere[..., None], 0.0)
        return leave_split_layers(vectors, self.tp_group, sequence_parallel=self.sequence_parallel)


def enter_split_layers(
    hidden: torch.Tensor, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Tensor:
    """``[s / tp, b, h]`` or, without sequence parallelism, ``[s, b, h]`` to ``[s, b, h]``."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, group=tp_group)
    return copy_to_tensor_model_parallel_region(hidden, tp_group)


def leave_split_layers(
    partial: torch.Tensor, tp_group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Tensor:
    """Sum the ranks' ``[s, b, h]``. With sequence parallelism keep ``[s / tp, b, h]``."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, tp_group)
    return reduce_from_tensor_model_parallel_region(partial, tp_group)


def mark_partial_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Mark gradients that cover only this tp rank's slice of the sequence."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def has_partial_gradient(parameter: torch.Tensor) -> bool:
    """Whether the gradient has to be summed over the tp ranks."""
    return bool(getattr(parameter, _MARK, False))


def sum_partial_gradients(
    gradients: list[torch.Tensor], tp_group: dist.ProcessGroup | None
) -> None:
    """Sum gradients over the tp group in place. One all-reduce, on all of its ranks or on none."""
    if not gradients or get_pg_size(tp_group) == 1:
        return
    if len(gradients) == 1:
        dist.all_reduce(gradients[0], group=tp_group)
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=tp_group)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(into) for part, into in zip(parts, gradients, strict=True)]
    )
