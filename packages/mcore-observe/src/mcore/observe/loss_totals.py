"""Sums of losses and counts of steps between two console lines, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mcore.observe.sinks.scalars import read_scalars, widest_float

ADVANCED = "advanced iterations"
SKIPPED = "skipped iterations"
NAN = "nan iterations"
_COUNTERS = (ADVANCED, SKIPPED, NAN)


def add_step(
    totals: dict[str, Any], losses: Mapping[str, torch.Tensor], skipped: bool, steps: int = 1
) -> None:
    """Count a step, or several with their average losses; add the losses unless it was skipped.

    Only the losses of a skipped step are copied to the host, to find those that are not finite.
    """
    checked = {
        key: loss
        if isinstance(loss, torch.Tensor)
        else torch.tensor(float(loss), dtype=torch.float64)
        for key, loss in losses.items()
    }
    is_nan = skipped and not all(math.isfinite(loss) for loss in read_scalars(checked).values())
    for counter, increment in ((ADVANCED, not skipped), (SKIPPED, skipped), (NAN, is_nan)):
        totals[counter] = totals.get(counter, 0) + int(increment) * steps
    if not skipped:
        if steps != 1:
            checked = {key: loss * steps for key, loss in checked.items()}
        add_losses(totals, checked)


def add_losses(totals: dict[str, Any], losses: Mapping[str, torch.Tensor]) -> None:
    """Add losses of one element to their float64 sums, in place and on their devices."""
    sums: list[torch.Tensor] = []
    terms: list[torch.Tensor] = []
    for key, loss in losses.items():
        term = loss.detach().reshape(1)
        if term.is_floating_point() and term.element_size() == 1:
            term = term.float()  # torch cannot add float8 to other types
        if key in totals:
            totals[key] = _match_sum(totals[key], term)
            sums.append(totals[key])
            terms.append(term)
        else:
            totals[key] = term.to(widest_float(term.device), copy=True)
    if sums:
        torch._foreach_add_(sums, terms)


def count_iterations(totals: Mapping[str, Any]) -> int:
    """Return the steps since the last reset, skipped ones included."""
    count: int = totals.get(ADVANCED, 0) + totals.get(SKIPPED, 0)
    return count


def loss_averages(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the averages of the losses over the steps not skipped, on their devices.

    Empty if every step was skipped. Sums and averages have the widest float of the device.
    """
    steps = totals.get(ADVANCED, 0)
    if not steps:
        return {}
    averages: dict[str, Any] = {}
    for key, total in totals.items():
        if key not in _COUNTERS:
            is_tensor = isinstance(total, torch.Tensor)
            averages[key] = (total.to(widest_float(total.device)) if is_tensor else total) / steps
    return averages


def reset_totals(totals: dict[str, Any]) -> None:
    """Set the losses to zero, keeping their keys, and the counts to 0."""
    for key, total in totals.items():
        if key not in _COUNTERS:
            totals[key] = torch.zeros_like(total) if isinstance(total, torch.Tensor) else 0.0
    totals.update(dict.fromkeys(_COUNTERS, 0))


def _match_sum(total: Any, term: torch.Tensor) -> torch.Tensor:
    """Return the sum with the shape and device of a term; callers keep sums of several kinds."""
    if not isinstance(total, torch.Tensor):
        return term.new_full((1,), float(total), dtype=widest_float(term.device))
    dtype = widest_float(term.device)
    if total.shape == term.shape and total.device == term.device and total.dtype == dtype:
        return total
    return total.to(term.device, dtype).reshape(1)
