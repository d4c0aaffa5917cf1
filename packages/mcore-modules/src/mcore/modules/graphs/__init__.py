"""Graphs of layers: specs, runners, the choice of a runner, and captures of all layers."""

from mcore.modules.graphs.capture import (
    capture_graphs,
    delete_graphs,
    num_graphs_needed,
    set_current_microbatch,
)
from mcore.modules.graphs.checked import CheckedGraph, GraphCall
from mcore.modules.graphs.local import LocalGraphManager
from mcore.modules.graphs.resolve import EagerGraphRunner, resolve_graph_runner
from mcore.modules.graphs.runner import (
    GraphedCallable,
    GraphRunner,
    GraphSpec,
    MemoryPool,
    graph_capturing,
    is_graph_capturing,
)
from mcore.modules.graphs.te_runner import TEGraphRunner
from mcore.modules.graphs.torch_runner import TorchGraphRunner

__all__ = [
    "CheckedGraph",
    "EagerGraphRunner",
    "GraphCall",
    "GraphRunner",
    "GraphSpec",
    "GraphedCallable",
    "LocalGraphManager",
    "MemoryPool",
    "TEGraphRunner",
    "TorchGraphRunner",
    "capture_graphs",
    "delete_graphs",
    "graph_capturing",
    "is_graph_capturing",
    "num_graphs_needed",
    "resolve_graph_runner",
    "set_current_microbatch",
]
