"""What the job logs of its own besides the training log: step time, norms, each rank's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe import calc_params_l2_norm, report_memory
from mcore.parallel import ProcessGroups

_ON_AN_ACCELERATOR = (
    "mem-allocated-gigabytes",
    "mem-max-allocated-gigabytes",
    "mem-max-reserved-gigabytes",
)
_ON_THE_HOST = ("mem-host-rss-gigabytes", "mem-max-host-rss-gigabytes")


def step_time(finished: Sequence[float]) -> dict[str, float]:
    """Seconds from the end of the step before to the end of this one, logs and all."""
    return {"step-time": finished[-1] - finished[-2]}


def interval_metrics(
    model: torch.nn.Module, model_config: Any, groups: ProcessGroups, device: torch.device
) -> dict[str, float]:
    """The norm of all parameters and the memory of every rank, equal on all ranks.

    All ranks call it: the sums of the norm, and one all-gather over the world.
    """
    norm = calc_params_l2_norm(model, model_config, pg_collection=groups)
    return {"params-norm": norm, **memory_of_ranks(device)}


def memory_of_ranks(device: torch.device) -> dict[str, float]:
    """``memory/rank<r>/<name>`` in gigabytes for every rank; one all-gather over the world.

    Args:
        device: this rank's device, whose allocator is read; on the CPU it is the process's memory.
    """
    names = _ON_THE_HOST if device.type == "cpu" else _ON_AN_ACCELERATOR
    report = report_memory(None)
    own = torch.tensor(
        [report.get(name, math.nan) for name in names], dtype=torch.float64, device=device
    )
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return {
        f"memory/rank{rank}/{name}": value
        for rank, row in enumerate(torch.stack(rows).tolist())
        for name, value in zip(names, row, strict=True)
    }
