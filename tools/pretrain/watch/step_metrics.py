"""Metrics of the job beyond the training log: step time, norms, memory, FLOPs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe import calc_params_l2_norm, report_memory
from mcore.parallel import ProcessGroups
from pretrain.model.stages import chunks_of
from pretrain.settings import Settings

_ON_AN_ACCELERATOR = (
    "mem-allocated-gigabytes",
    "mem-max-allocated-gigabytes",
    "mem-max-reserved-gigabytes",
)
_ON_THE_HOST = ("mem-host-rss-gigabytes", "mem-max-host-rss-gigabytes")


def interval_metrics(
    model: torch.nn.Module, model_config: Any, groups: ProcessGroups, device: torch.device
) -> dict[str, float]:
    """The norm of all parameters and the memory of every rank. All ranks call it."""
    norm = calc_params_l2_norm(chunks_of(model), model_config, pg_collection=groups)
    return {"params-norm": norm, **_gather_memory(device)}


def _gather_memory(device: torch.device) -> dict[str, float]:
    """``memory/rank<r>/<name>`` in gigabytes for every rank. One all-gather over the world.

    Memory of the device's allocator, or on a CPU of the process.
    """
    names = _ON_THE_HOST if device.type == "cpu" else _ON_AN_ACCELERATOR
    report = report_memory(None)
    values = torch.tensor(
        [report.get(name, math.nan) for name in names], dtype=torch.float64, device=device
    )
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return {
        f"memory/rank{rank}/{name}": value
        for rank, row in enumerate(torch.stack(rows).tolist())
        for name, value in zip(names, row, strict=True)
    }


def training_flops(settings: Settings) -> int:
    """Floating point operations of one step's matrix products, forward and backward, of all ranks.

    Forward, per token and layer: ``24 h^2`` in the linears and ``4 s h`` in attention, causal or
    not. Per token: ``2 h v`` for the logits or ``2 h`` for a value. With experts ``16 h^2`` of a
    layer count once per expert of a token, plus ``2 h e`` for the router. A second token costs a
    layer, ``4 h^2`` and the logits. Backward costs twice as much as forward.
    """
    hidden, length = settings.hidden_size, settings.seq_length
    layer = 24 * hidden * hidden + 4 * length * hidden
    if settings.experts:
        layer += 16 * (settings.topk - 1) * hidden * hidden + 2 * hidden * settings.experts
    num_outputs = 1 if settings.value_head else settings.vocabulary_size
    outputs = 2 * hidden * num_outputs
    forward = settings.num_layers * layer + outputs
    if settings.mtp:
        forward += layer + 4 * hidden * hidden + outputs
    return 3 * forward * settings.global_batch_size * length
