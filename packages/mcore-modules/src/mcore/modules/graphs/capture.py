"""Graphs of all layers: their capture, number, release and current microbatch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mcore.modules.config import read_field
from mcore.modules.graphs.graphable import GraphableMegatronModule, refuse_hooks
from mcore.modules.graphs.local import LocalGraphManager
from mcore.modules.graphs.resolve import resolve_graph_runner
from mcore.modules.graphs.runner import (
    GraphRunner,
    GraphSpec,
    GraphStateError,
    graph_capturing,
    preserved_state,
)
from mcore.modules.traversal import iter_modules
from mcore.modules.wrappers import unwrap_model
from mcore.tensor.device import device_of

logger = logging.getLogger(__name__)
SampleInputs = Sequence[Mapping[str, "torch.Tensor | None"]]


def capture_graphs(
    layers: Iterable[torch.nn.Module],
    seq_length: int,
    micro_batch_size: int,
    *,
    num_graphs: int = 1,
    runner: GraphRunner | None = None,
    sample_inputs: SampleInputs | None = None,
    num_warmup_iters: int | None = None,
) -> None:
    """Capture ``num_graphs`` graphs of each layer and put them into ``layer.cuda_graphs``.

    Layers replay them in training if their configuration has
    ``cuda_graph_impl="transformer_engine"``, see :func:`set_current_microbatch`. Buffers and random
    states (of the CPU, the device and the model-parallel tracker) are restored afterwards, and
    ``.grad`` is not changed. Local to the rank, but layers may communicate during the capture.

    Args:
        layers: Layers in execution order.
        seq_length: Length of the whole sequences, in tokens.
        micro_batch_size: Sequences per microbatch.
        num_graphs: Graphs per layer, see :func:`num_graphs_needed`.
        runner: Captures the graphs. Default: the first layer's ``graph_runner``, else by
            configuration and device.
        sample_inputs: For each layer its inputs by name. ``hidden_states`` is passed by position,
            and None is omitted. Default:
            ``layer.get_layer_static_inputs(seq_length, micro_batch_size)``. Each graph gets copies.
        num_warmup_iters: Eager runs before each capture. Default: the first layer's
            ``cuda_graph_warmup_steps``, else 3.

    Raises:
        TypeError: A layer is not a GraphableMegatronModule.
        GraphStateError: A layer is in evaluation mode, has graphs, has hooks that a graph would
            leave out, or draws from a random tracker with plain states.
        ValueError: ``num_graphs`` is below 1, or ``sample_inputs`` is not one mapping per layer.

    Example:
        >>> import torch
        >>> from mcore.modules import TransformerConfig
        >>> from mcore.modules.graphs import EagerGraphRunner
        >>> class Layer(GraphableMegatronModule):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
        ...     def forward(self, hidden_states):
        ...         return self.linear(hidden_states)
        >>> config = TransformerConfig(
        ...     num_layers=1,
        ...     hidden_size=4,
        ...     num_attention_heads=2,
        ...     cuda_graph_impl="transformer_engine",
        ... )
        >>> layer = Layer(config)
        >>> capture_graphs([layer], 2, 1, num_graphs=2, runner=EagerGraphRunner())
        >>> len(layer.cuda_graphs), layer(torch.ones(2, 1, 4, requires_grad=True)).shape
        (2, torch.Size([2, 1, 4]))
    """
    checked = _check_layers(layers)
    if num_graphs < 1:
        raise ValueError(f"num_graphs is {num_graphs}. Pass at least 1")
    if sample_inputs is not None and len(sample_inputs) != len(checked):
        raise ValueError(
            f"{len(sample_inputs)} sample inputs for {len(checked)} layers. Pass one mapping each"
        )
    if not checked:
        return
    device = device_of(checked[0].parameters())
    config = checked[0].config
    runner = runner or checked[0].graph_runner or resolve_graph_runner(config, device)
    if num_warmup_iters is None:
        num_warmup_iters = read_field(config, "cuda_graph_warmup_steps", 3)
    sizes = (seq_length, micro_batch_size)
    impl = read_field(config, "cuda_graph_impl", "none")
    if impl != "transformer_engine":
        logger.warning(
            "graphs are captured, but cuda_graph_impl is %r: they are replayed only while it is "
            "'transformer_engine'",
            impl,
        )
    with graph_capturing(), preserved_state(checked, device):
        specs = [
            _make_spec(layer, order, slot, sample_inputs, sizes)
            for slot in range(num_graphs)
            for order, layer in enumerate(checked)
        ]
        graphs = runner.capture(specs, num_warmup_iters=num_warmup_iters, allow_unused_input=True)
        if len(graphs) != len(specs):
            raise GraphStateError(
                f"the runner returned {len(graphs)} graphs for {len(specs)} specs"
            )
        # Specs are in the order of slots, and in each slot in the order of layers.
        for order, layer in enumerate(checked):
            layer.cuda_graphs = list(graphs[order :: len(checked)])


def delete_graphs(layers: Iterable[torch.nn.Module]) -> None:
    """Free the graphs of layers, captured together or separately, and remove manual hooks.

    Does nothing for layers without graphs.

    Args:
        layers: Layers.

    Raises:
        TypeError: A layer is not a GraphableMegatronModule.

    Example:
        >>> layer = GraphableMegatronModule(None)
        >>> delete_graphs([layer])
        >>> layer.cuda_graphs
        []
    """
    for layer in [_require_graphable(layer) for layer in layers]:
        for graph in layer.cuda_graphs:
            graph.reset()
        layer.cuda_graphs = []
        layer.cuda_graph_manual_hooks = []
        manager = getattr(layer, "cudagraph_manager", None)
        if isinstance(manager, LocalGraphManager):
            manager.reset()


def set_current_microbatch(model: Any, microbatch: int) -> None:
    """Set the microbatch of the next call in every graphable layer of a model.

    Args:
        model: A model or a list of models, wrapped or not.
        microbatch: Number of the microbatch in its step, from 0.

    Raises:
        ValueError: ``microbatch`` is negative.

    Example:
        >>> layer = GraphableMegatronModule(None)
        >>> set_current_microbatch(layer, 3)
        >>> layer.current_microbatch
        3
    """
    if microbatch < 0:
        raise ValueError(f"microbatch is {microbatch}. Count from 0")
    models = model if isinstance(model, (list, tuple)) else [model]
    for one in models:
        for module in iter_modules(unwrap_model(one)):
            if isinstance(module, GraphableMegatronModule):
                # Not nn.Module.__setattr__, which is slow: this runs for each microbatch.
                module.__dict__["current_microbatch"] = microbatch


def num_graphs_needed(
    num_microbatches: int, pp_rank: int, pp_size: int, vp_size: int | None = None
) -> int:
    """Return the number of graphs per layer that avoids the reuse of a graph in flight.

    Microbatch ``i`` uses graph ``i % number``.

    Args:
        num_microbatches: Microbatches per step.
        pp_rank: Rank in the pipeline group.
        pp_size: Size of the pipeline group.
        vp_size: Model chunks per pipeline rank, None or 1 for a schedule that is not interleaved.

    Returns:
        1 without a pipeline. With one-forward-one-backward the microbatches in flight on this
        stage, ``min(num_microbatches, pp_size - pp_rank)``. With an interleaved schedule all
        microbatches.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> num_graphs_needed(64, 7, 8), num_graphs_needed(64, 0, 8)
        (1, 8)
    """
    if num_microbatches < 1 or not 0 <= pp_rank < pp_size or (vp_size is not None and vp_size < 1):
        raise ValueError(
            f"got num_microbatches={num_microbatches}, pp_rank={pp_rank}, pp_size={pp_size}, "
            f"vp_size={vp_size}. Pass sizes of at least 1 and a rank below pp_size"
        )
    if pp_size == 1:
        return 1
    if vp_size is not None and vp_size > 1:
        return num_microbatches
    return min(num_microbatches, pp_size - pp_rank)


def _require_graphable(layer: torch.nn.Module) -> GraphableMegatronModule:
    if not isinstance(layer, GraphableMegatronModule):
        raise TypeError(
            f"a layer is a {type(layer).__name__}. Pass GraphableMegatronModule instances"
        )
    return layer


def _check_layers(layers: Iterable[torch.nn.Module]) -> list[GraphableMegatronModule]:
    checked = [_require_graphable(layer) for layer in layers]
    for order, layer in enumerate(checked):
        name = f"layer {order} ({type(layer).__name__})"
        if not layer.training:
            raise GraphStateError(f"{name} is in evaluation mode. Call train() before the capture")
        if layer.cuda_graphs:
            raise GraphStateError(f"{name} has graphs. Call delete_graphs() before the capture")
        refuse_hooks(layer, name)
    return checked


def _make_spec(
    layer: GraphableMegatronModule,
    order: int,
    slot: int,
    sample_inputs: SampleInputs | None,
    sizes: tuple[int, int],
) -> GraphSpec:
    if sample_inputs is None:
        inputs = layer.get_layer_static_inputs(*sizes)
    else:
        # Copies: a graph's inputs must not change until its backward.
        inputs = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in sample_inputs[order].items()
            if tensor is not None
        }
    hidden_states = inputs.pop("hidden_states", None)
    if hidden_states is None:
        raise ValueError(
            f"the sample inputs of layer {order} ({type(layer).__name__}) have no 'hidden_states'"
        )
    return GraphSpec(
        module=layer,
        fn=layer._te_cuda_graph_capture,
        args=(hidden_states,),
        kwargs={name: tensor for name, tensor in inputs.items() if tensor is not None},
        microbatch=slot,
        order=order,
    )
