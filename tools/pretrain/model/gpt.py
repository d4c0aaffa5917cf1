"""The GPT: embedding, transformer layers, and a tied or untied head over tokens or a value head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
from pretrain.model.attention import SelfAttention, causal_mask
from pretrain.model.configuration import ModelConfig
from pretrain.model.deferred import DeferredWeightGradient
from pretrain.model.experts import ExpertFeedForward
from pretrain.model.mtp import PredictionAhead
from pretrain.model.norm import LayerNorm
from pretrain.model.randomness import ParameterInit, inner_init, output_init, stream_for
from pretrain.model.rotary import rotary_table
from pretrain.model.stages import Stage, as_replica, mark_shared_embedding
from pretrain.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelTable,
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
            config, init, f"{name}.narrow", (inner, hidden), weight_init=output_init(config)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        narrowed: torch.Tensor = self.narrow(F.gelu(self.widen(hidden)))
        return narrowed


class TransformerLayer(GraphableMegatronModule):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, init: ParameterInit, groups: ProcessGroups, number: int
    ) -> None:
        super().__init__(config)
        name = f"layers.{number}"
        device = init.device
        self.attention_norm = LayerNorm(config.hidden_size, device=device)
        self.attention = SelfAttention(config, init, f"{name}.attention", groups)
        self.feed_forward_norm = LayerNorm(config.hidden_size, device=device)
        name = f"{name}.feed_forward"
        self.feed_forward = (
            ExpertFeedForward(config, init, name, groups, number=number)
            if config.num_moe_experts
            else FeedForward(config, init, name)
        )
        self.dropout = config.dropout
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

        ``s`` is the length of this rank's part: 1 / cp of the sequence, and with sequence
        parallelism 1 / tp of that part.
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


class GPT(MegatronModule):
    """Token ids of this rank's part of the sequences to logits of its part of the vocabulary.

    ``output_layer`` is None if the embedding's weight computes the logits. With a value head as
    ``output_layer``, the output is ``[s / cp, b, 1]`` values in fp32, equal on all tp ranks. A
    pipeline stage has some of the layers, and the last stage a copy of a tied embedding. With
    ``mtp_num_layers`` there is one more block, for the tokens after the next tokens.
    """

    def __init__(
        self, config: ModelConfig, init: ParameterInit, groups: ProcessGroups, stage: Stage
    ) -> None:
        super().__init__(config)
        self.pg_collection = groups
        self.recompute = config.recompute
        self.stage = stage
        self.deferred: DeferredWeightGradient | None = None
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.head_size = config.hidden_size // config.num_attention_heads
        is_copy = stage.is_last and not stage.is_first
        self.embedding: VocabParallelTable | None = None
        if stage.is_first or (is_copy and not config.untied):
            self.embedding = VocabParallelTable(config, init, "embedding")
            if not config.untied and not (stage.is_first and stage.is_last):
                mark_shared_embedding(self.embedding.weight, is_copy=is_copy)
        self.layers = torch.nn.ModuleList()
        for number in stage.layers:  # named as in the whole model
            self.layers.add_module(str(number), TransformerLayer(config, init, groups, number))
        self.final_norm: LayerNorm | None = None
        self.output_layer: VocabParallelTable | LinearForLastLayer | None = None
        self.mtp: PredictionAhead | None = None
        if not stage.is_last:
            return
        if config.mtp_num_layers:
            more = TransformerLayer(config, init, groups, config.num_layers)
            self.mtp = PredictionAhead(config, init, more)
        self.final_norm = LayerNorm(config.hidden_size, device=init.device)
        if config.sequence_parallel:
            mark_partial_gradients(self.final_norm.parameters())
        if config.untied:
            self.output_layer = VocabParallelTable(config, init, "head")

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        hidden: torch.Tensor | None = None,
        next_tokens: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``[b, s / cp]`` ids and true positions to ``[s / cp, b, vocabulary / tp]`` logits.

        With ``next_tokens`` it returns two of these, the second for the tokens after them. All
        stages but the first need the ``hidden`` states of the previous stage, and all but the last
        return theirs: ``[s / cp, b, h]``, or 1 / tp of that with sequence parallelism.
        ``cu_seqlens`` has the borders of the documents that are packed into all sequences.
        """
        if cu_seqlens is None:
            position_ids = position_ids[:1]
            mask = causal_mask(position_ids[0], self.cp_group)
        else:
            mask = document_mask(cu_seqlens, len(tokens), self.cp_group, tokens.device)
        rotary = rotary_table(position_ids.T, self.head_size)
        if hidden is None:
            hidden = self._embed(tokens)

        def run(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            one = functools.partial(layer, rotary=rotary, attention_mask=mask)
            if self.recompute:
                return self._run_recomputed(one, hidden)
            made: torch.Tensor = one(hidden)
            return made

        for layer in self.layers:
            hidden = run(layer, hidden)
        if self.final_norm is None:
            return hidden
        logits = self._compute_logits(self.final_norm(hidden))
        if self.mtp is None or next_tokens is None:
            return logits
        return logits, self._compute_logits(self.mtp(hidden, self._embed(next_tokens), run))

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in every module. The first stage saves a shared embedding, not the last."""
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        if self.embedding is not None and not self.stage.is_first:
            name = f"{prefix}embedding.weight"
            state[name] = as_replica(state[name])
        return state

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            raise TypeError(f"the stage of layers {self.stage.layers} needs hidden states")
        embedded: torch.Tensor = self.embedding(tokens.transpose(0, 1))
        return embedded

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(self.output_layer, LinearForLastLayer):
            values: torch.Tensor = self.output_layer(hidden)[0]
            return values
        is_split = self.config.sequence_parallel
        entered = enter_split_layers(hidden, self.tp_group, sequence_parallel=is_split)
        weight = self.logit_weight
        if self.deferred is not None:
            return self.deferred.linear(entered, weight, kept=hidden if is_split else entered)
        return F.linear(entered, weight)

    @property
    def logit_weight(self) -> torch.nn.Parameter:
        """The weight of the output head over tokens. Raises TypeError if there is none."""
        owner = self.embedding if self.output_layer is None else self.output_layer
        if isinstance(owner, VocabParallelTable):
            return owner.weight
        raise TypeError(f"the stage of layers {self.stage.layers} has no output head over tokens")

    def _run_recomputed(
        self, run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        # Without sequence parallelism, keep only this rank's slice of the hidden states.
        distribute = not self.config.sequence_parallel
        return checkpoint_activations(run, distribute, hidden, tp_group=self.tp_group)


def put_value_head(chunks: list[GPT], config: TransformerConfig, init: ParameterInit) -> None:
    """Make the output layer a value head, equal in every layout. Collective on the tp group."""
    vp_size = len(chunks) if len(chunks) > 1 else None
    make_value_model(config.hidden_size, config.sequence_parallel, vp_size=vp_size)(chunks)
    if not chunks[-1].stage.is_last:
        return
    head = chunks[-1].output_layer
    if not isinstance(head, torch.nn.Linear):
        raise TypeError(f"the value head is a {type(head).__name__}, not a linear layer")
    weight = init.whole("output_layer.weight", tuple(head.weight.shape), inner_init(config))
    with torch.no_grad():
        head.weight.copy_(weight)
