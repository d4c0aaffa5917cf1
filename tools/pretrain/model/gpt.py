"""The GPT: embedding, transformer layers, and a tied or untied head over tokens or a value head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from mcore.modules import (
    GraphableMegatronModule,
    LinearForLastLayer,
    MegatronModule,
    TransformerConfig,
    make_value_model,
)
from mcore.parallel import ProcessGroups, checkpoint_activations
from mcore.tensor import make_viewless_tensor
from pretrain.model.attention import SelfAttention, causal_mask, rotary_table
from pretrain.model.randomness import ParameterInit, inner_init, output_init, stream_for
from pretrain.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelModule,
    VocabParallelEmbedding,
    enter_split_layers,
    mark_partial_gradients,
)
from pretrain.packing import document_mask


class FeedForward(MegatronModule):
    """Two linears with GELU between them, split over the tp group by column and by row."""

    def __init__(self, config: TransformerConfig, init: ParameterInit, name: str) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        inner = config.ffn_hidden_size or 4 * hidden
        self.widen = ColumnParallelLinear(
            config, init, f"{name}.widen", (hidden, inner), weight_init=inner_init(config)
        )
        self.narrow = RowParallelLinear(
            config,
            init,
            f"{name}.narrow",
            (inner, hidden),
            weight_init=output_init(config),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        narrowed: torch.Tensor = self.narrow(F.gelu(self.widen(hidden)))
        return narrowed


class TransformerLayer(GraphableMegatronModule):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        init: ParameterInit,
        number: int,
        *,
        cp_group: torch.distributed.ProcessGroup | None,
        dropout: float,
    ) -> None:
        super().__init__(config)
        name = f"layers.{number}"
        device = init.device
        self.attention_norm = torch.nn.LayerNorm(config.hidden_size, device=device)
        self.attention = SelfAttention(
            config, init, f"{name}.attention", cp_group=cp_group, dropout=dropout
        )
        self.feed_forward_norm = torch.nn.LayerNorm(config.hidden_size, device=device)
        self.feed_forward = FeedForward(config, init, f"{name}.feed_forward")
        self.dropout = dropout
        if config.sequence_parallel:
            for norm in (self.attention_norm, self.feed_forward_norm):
                mark_partial_gradients(norm.parameters())

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[s, b, h]`` to the same, as a tensor that is not a view.

        ``s`` is the length of this rank's part: one of cp parts, and with sequence parallelism one
        of tp parts of that.
        """
        attended = self.attention(self.attention_norm(hidden_states), rotary, attention_mask)
        hidden_states = hidden_states + self._drop(attended)
        widened = self.feed_forward(self.feed_forward_norm(hidden_states))
        hidden_states = hidden_states + self._drop(widened)
        return make_viewless_tensor(hidden_states, requires_grad=True, keep_graph=True)

    def _drop(self, added: torch.Tensor) -> torch.Tensor:
        if not (self.dropout and self.training):
            return added
        with stream_for(differs_over_tp=self.config.sequence_parallel):
            return F.dropout(added, self.dropout)


class OutputHead(TensorParallelModule):
    """A weight of its own for the logits, where the head is not tied to the embedding."""

    shard_axes: ClassVar = {"weight": 0}
    padded: ClassVar = ("weight",)

    def __init__(
        self, config: TransformerConfig, init: ParameterInit, vocabulary_size: int
    ) -> None:
        super().__init__(config, init)
        shape = (vocabulary_size, config.hidden_size)
        self.weight = init.shard("head.weight", shape, inner_init(config), axis=0)


class GPT(MegatronModule):
    """Token ids of this rank's part of the sequences to logits of its part of the vocabulary.

    ``output_layer`` is None where the embedding's weight gives the logits. A value head put there
    makes the output ``[s / cp, b, 1]`` values in fp32 instead, equal on all tp ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        init: ParameterInit,
        groups: ProcessGroups,
        *,
        vocabulary_size: int,
        untied: bool,
        dropout: float,
        recompute: bool = False,
    ) -> None:
        super().__init__(config)
        self.pg_collection = groups
        self.recompute = recompute
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.head_size = config.hidden_size // config.num_attention_heads
        self.embedding = VocabParallelEmbedding(config, init, vocabulary_size)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(config, init, number, cp_group=groups.cp, dropout=dropout)
            for number in range(config.num_layers)
        )
        self.final_norm = torch.nn.LayerNorm(config.hidden_size, device=init.device)
        if config.sequence_parallel:
            mark_partial_gradients(self.final_norm.parameters())
        self.output_layer: OutputHead | LinearForLastLayer | None = (
            OutputHead(config, init, vocabulary_size) if untied else None
        )

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[b, s / cp]`` ids and true positions to ``[s / cp, b, vocabulary / tp]`` logits.

        ``cu_seqlens`` has the borders of the documents that are packed into all sequences.
        """
        if cu_seqlens is None:
            position_ids = position_ids[:1]
            mask = causal_mask(position_ids[0], self.cp_group)
        else:
            mask = document_mask(cu_seqlens, len(tokens), self.cp_group, tokens.device)
        rotary = rotary_table(position_ids.T, self.head_size)
        hidden = self.embedding(tokens.transpose(0, 1))
        for layer in self.layers:
            run = functools.partial(layer, rotary=rotary, attention_mask=mask)
            hidden = self._recomputed(run, hidden) if self.recompute else run(hidden)
        hidden = self.final_norm(hidden)
        if isinstance(self.output_layer, LinearForLastLayer):
            values: torch.Tensor = self.output_layer(hidden)[0]
            return values
        owner = self.embedding if self.output_layer is None else self.output_layer
        hidden = enter_split_layers(
            hidden, self.tp_group, sequence_parallel=self.config.sequence_parallel
        )
        return F.linear(hidden, owner.weight)

    def _recomputed(
        self, run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        # What sequence parallelism has not cut already is kept in parts.
        distribute = not self.config.sequence_parallel
        return checkpoint_activations(run, distribute, hidden, tp_group=self.tp_group)


def put_value_head(model: GPT, config: TransformerConfig, init: ParameterInit) -> None:
    """Make the output layer a value head, in any layout the same; collective on the tp group."""
    make_value_model(config.hidden_size, config.sequence_parallel)(model)
    head = model.output_layer
    if not isinstance(head, torch.nn.Linear):
        raise TypeError(f"the value head is a {type(head).__name__}, not a linear layer")
    weight = init.whole("output_layer.weight", tuple(head.weight.shape), inner_init(config))
    with torch.no_grad():
        head.weight.copy_(weight)
