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
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for key, loss in losses.items():
        totals.setdefault(key, 0.0)
        by_device.setdefault(loss.device, {})[key] = loss.reshape(()) if loss.dim() else loss
    for device, by_key in by_device.items():
        sums, terms = _join_sums(totals, list(by_key), device), list(by_key.values())
        kinds = {term.dtype for term in terms}
        if len(kinds) > 1 or terms[0].element_size() == 1:
            terms = [term.to(sums.dtype) for term in terms]  # torch cannot combine float8
        sums.add_((torch.stack(terms) if len(terms) > 1 else terms[0]).detach())


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


def _join_sums(totals: dict[str, Any], keys: list[str], device: torch.device) -> torch.Tensor:
    """Return a vector whose elements are the sums: one addition is that of all losses."""
    sums, dtype = [totals[key] for key in keys], widest_float(device)
    joined = getattr(sums[0], "_base", None)
    if joined is not None and joined.dtype == dtype and joined.device == device:
        at = [s.storage_offset() for s in sums if getattr(s, "_base", None) is joined and s.dim()]
        if at == list(range(len(keys))) and joined.shape == (len(keys),):
            return joined  # type: ignore[no-any-return]
    joined = torch.zeros(len(keys), dtype=dtype, device=device)
    for index, (key, total) in enumerate(zip(keys, sums, strict=True)):
        is_tensor = isinstance(total, torch.Tensor)  # callers keep sums of several kinds
        totals[key] = joined[index : index + 1]
        totals[key].add_(total.detach().to(device).reshape(1) if is_tensor else total)
    return joined
