"""What became of the graphs that the run was to use."""

from __future__ import annotations

import torch

from mcore.modules import GraphableMegatronModule
from mcore.modules.graphs import LocalGraphManager


def describe_graphs(model: torch.nn.Module) -> str:
    """How many graphs the layers of a model run from, and which runner captured them."""
    managers = [
        module.cudagraph_manager
        for module in model.modules()
        if isinstance(module, GraphableMegatronModule) and hasattr(module, "cudagraph_manager")
    ]
    local = [manager for manager in managers if isinstance(manager, LocalGraphManager)]
    names = {manager.runner.name for manager in local if manager.runner is not None}
    if not names:
        return "none captured: too few steps"
    captured = sum(manager.num_graphs for manager in local)
    return f"{captured} for {len(local)} layers, by the {', '.join(sorted(names))} runner"
