"""Turns the GPT into a value model: the same trunk, one number for each byte."""

from __future__ import annotations

import torch

from mcore.modules import TransformerConfig, make_value_model
from pretrain.model import GPT
from pretrain.parameter_init import ParameterInit, inner_init


def put_value_head(model: GPT, config: TransformerConfig, init: ParameterInit) -> None:
    """Make the output layer a value head whose initial weight does not depend on the layout.

    Collective on the tp group.
    """
    make_value_model(config.hidden_size, config.sequence_parallel)(model)
    head = model.output_layer
    if not isinstance(head, torch.nn.Linear):
        raise TypeError(f"the value head is a {type(head).__name__}, not a linear layer")
    weight = init.whole("output_layer.weight", tuple(head.weight.shape), inner_init(config))
    with torch.no_grad():
        head.weight.copy_(weight)
