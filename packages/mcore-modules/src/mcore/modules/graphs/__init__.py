"""Capturing layers in graphs: the interface, its implementations and the choice among them."""

from mcore.modules.graphs.capturing import graph_capturing, is_graph_capturing
from mcore.modules.graphs.checked import CheckedGraph
from mcore.modules.graphs.contract import GraphedCallable, GraphRunner, GraphSpec
from mcore.modules.graphs.eager import EagerGraphRunner
from mcore.modules.graphs.local_manager import LocalGraphManager
from mcore.modules.graphs.resolve import resolve_graph_runner
from mcore.modules.graphs.te_runner import TEGraphRunner
from mcore.modules.graphs.torch_runner import TorchGraphRunner

__all__ = [
    "CheckedGraph",
    "EagerGraphRunner",
    "GraphRunner",
    "GraphSpec",
    "GraphedCallable",
    "LocalGraphManager",
    "TEGraphRunner",
    "TorchGraphRunner",
    "graph_capturing",
    "is_graph_capturing",
    "resolve_graph_runner",
]
