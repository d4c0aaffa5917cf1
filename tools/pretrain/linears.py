"""Tensor-parallel building blocks: linears by column and by row, and the embedding by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from mcore.modules import MegatronModule, TransformerConfig
from mcore.parallel.checkpoint import make_sharded_tensors_for_checkpoint
from mcore.parallel.groups import get_pg_rank
from pretrain.parameter_init import Init, ParameterInit, inner_init
from pretrain.sequence_parallel import (
    enter_split_layers,
    leave_split_layers,
    mark_partial_gradients,
)

Offsets = Sequence[tuple[int, int, int]]


class TensorParallelModule(MegatronModule):
    """A module some of whose parameters are slices.

    ``shard_axes`` names them with their axis; ``padded`` names those whose global length depends on
    the layout, because rows were added to fill up the last rank.
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
        """Slices say where they lie in the whole tensor."""
        sharded = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            self.shard_axes,
            tuple(sharded_offsets),
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name in self.padded:
            sharded[prefix + name].allow_shape_mismatch = True
        return dict(sharded)


class ColumnParallelLinear(TensorParallelModule):
    """``[s, b, in]`` equal on all ranks to this rank's ``[s, b, out / tp]``.

    Forward has no communication; backward sums the input gradient over the tp group. With sequence
    parallelism the input is ``[s / tp, b, in]``, gathered in forward; backward reduce-scatters.
    """

    shard_axes: ClassVar = {"weight": 0, "bias": 0}

    def __init__(
        self,
        config: TransformerConfig,
        init: ParameterInit,
        name: str,
        sizes: tuple[int, int],
        *,
        weight_init: Init,
    ) -> None:
        super().__init__(config, init)
        size_in, size_out = sizes
        self.weight = init.shard(f"{name}.weight", (size_out, size_in), weight_init, axis=0)
        self.bias = init.shard(f"{name}.bias", (size_out,), torch.nn.init.zeros_, axis=0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, in]`` to ``[s, b, out / tp]``."""
        hidden = enter_split_layers(hidden, self.tp_group, sequence_parallel=self.sequence_parallel)
        return F.linear(hidden, self.weight, self.bias)


class RowParallelLinear(TensorParallelModule):
    """This rank's ``[s, b, in / tp]`` to ``[s, b, out]`` equal on all ranks.

    Forward sums over the tp group; backward has no communication. The bias is added once. With
    sequence parallelism the output is ``[s / tp, b, out]``: forward reduce-scatters, backward
    gathers.
    """

    shard_axes: ClassVar = {"weight": 1}

    def __init__(
        self,
        config: TransformerConfig,
        init: ParameterInit,
        name: str,
        sizes: tuple[int, int],
        *,
        weight_init: Init,
    ) -> None:
        super().__init__(config, init)
        size_in, size_out = sizes
        self.weight = init.shard(f"{name}.weight", (size_out, size_in), weight_init, axis=1)
        self.bias = init.replica(f"{name}.bias", (size_out,), torch.nn.init.zeros_)
        if self.sequence_parallel:
            mark_partial_gradients([self.bias])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, in / tp]`` to ``[s, b, out]``."""
        partial = F.linear(hidden, self.weight)
        whole = leave_split_layers(partial, self.tp_group, sequence_parallel=self.sequence_parallel)
        return whole + self.bias


class VocabParallelEmbedding(TensorParallelModule):
    """Byte ids to vectors; the rows of the table are split over the tp group."""

    shard_axes: ClassVar = {"weight": 0}
    padded: ClassVar = ("weight",)

    def __init__(
        self, config: TransformerConfig, init: ParameterInit, vocabulary_size: int
    ) -> None:
        super().__init__(config, init)
        shape = (vocabulary_size, config.hidden_size)
        self.weight = init.shard("embedding.weight", shape, inner_init(config), axis=0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[s, b]`` ids to ``[s, b, h]`` vectors, or this rank's ``[s / tp, b, h]`` of them."""
        rows = self.weight.shape[0]
        local = tokens - get_pg_rank(self.tp_group) * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        vectors = vectors.masked_fill(elsewhere[..., None], 0.0)
        return leave_split_layers(vectors, self.tp_group, sequence_parallel=self.sequence_parallel)
