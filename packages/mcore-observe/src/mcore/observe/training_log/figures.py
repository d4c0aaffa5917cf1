"""Figures of the readable console line: rates, waiting for data, the device, the worst rank."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.loss_totals import loss_averages
from mcore.observe.timers import Timers
from mcore.observe.training_log.interval import Interval
from mcore.observe.training_log.step import LogStep, StepValues
from mcore.observe.values.scalars import widest_float
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import is_distributed

DATA_TIMER = "batch-generator"
_NUM_LOSSES = 8  # whose largest value over the ranks is shown
_NOTHING = -math.inf  # what a rank without a figure adds to a maximum

# Dense bf16 TFLOP/s by the start of torch's device name: multiprocessors, their clock in GHz while
# the matrix units work, and operations of one per clock, where the maker states all three; else
# the figure of the data sheet, with sparsity halved; None for what has no such figure.
# Not the AMD Instinct MI250X: torch shows each of its two dies as a device.
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU Architecture (white paper): boost clock
    "NVIDIA A100": 108 * 1.41 * 2.048,
    # NVIDIA H100 Tensor Core GPU Architecture (white paper): boost clock for tensor core operations
    "NVIDIA H100 PCIe": 114 * 1.62 * 4.096,
    "NVIDIA H100 80GB HBM3": 132 * 1.83 * 4.096,
    "NVIDIA H100 NVL": 835.0,  # NVIDIA H100 data sheet
    # NVIDIA H200 data sheet: its SXM part computes as the H100's
    "NVIDIA H200": 132 * 1.83 * 4.096,
    "NVIDIA H200 NVL": None,
    "NVIDIA B200": 2250.0,  # NVIDIA DGX B200 data sheet, a device's share
    "NVIDIA GB200": 2500.0,  # NVIDIA GB200 NVL72 data sheet, a device's share
    # NVIDIA Ada GPU Architecture (white paper) and L4 data sheet
    "NVIDIA L4": 58 * 2.04 * 1.024,
    # AMD CDNA 3 (white paper), and the data sheets of the two
    "AMD Instinct MI300X": 304 * 2.1 * 2.048,
    "AMD Instinct MI325X": 304 * 2.1 * 2.048,
}


@dataclass(frozen=True)
class Figures:
    """What the readable line shows besides values of the step; the largest over all ranks."""

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu_percent: float | None = None
    data_percent: Any = None
    memory_percent: Any = None
    allocator_retries: Any = None
    ooms: Any = None
    largest_losses: Mapping[str, Any] = field(default_factory=dict)


class DataClock:
    """Measures how long this rank has waited for data since the last line."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._added_s: float | None = None

    def add(self, seconds: float) -> None:
        """Add a wait that no timer measures."""
        self._added_s = (self._added_s or 0.0) + seconds

    def take_seconds(self, timers: Any) -> float | None:
        """Return the waits since the last call: what was added, else ``batch-generator``'s time."""
        added_s, self._added_s = self._added_s, None
        timer = timers.find(DATA_TIMER) if isinstance(timers, Timers) else None
        if timer is None or added_s is not None:
            return added_s
        active_s = timer.active_time()
        waited_s, self._seen_s = active_s - self._seen_s, active_s
        return waited_s if waited_s >= 0 else active_s


def measure_figures(
    step: LogStep,
    values: StepValues,
    totals: Mapping[str, Any],
    interval: Interval,
    *,
    iterations: int,
    waited_s: float | None,
    samples: float | None,
    tokens: float | None,
) -> Figures:
    """Measure the figures of an interval; one maximum over the world, which all ranks enter."""
    seconds = (interval.seconds_per_iteration or 0.0) * iterations
    if samples is None:
        samples = values.batch_size * iterations
    if tokens is None and step.seq_length:
        tokens = samples * step.seq_length
    share = waited_s / seconds if waited_s is not None and seconds else None
    local = [_as_percent(share), *_memory()]
    largest, losses = _largest_over_ranks(local, loss_averages(totals))
    peak = _peak_of_this_device()
    tflops = interval.tflops_per_device
    return Figures(
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        samples_per_s=samples / seconds if not tokens and seconds else None,
        mfu_percent=100 * tflops / peak if tflops and peak else None,
        data_percent=largest[0],
        memory_percent=largest[1],
        allocator_retries=largest[2],
        ooms=largest[3],
        largest_losses=losses,
    )


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device; None for parts of one and for unknown ones."""
    if " MIG " in device_name:
        return None
    found = [name for name in _PEAKS if _is_model(device_name, name)]
    return _PEAKS[max(found, key=len)] if found else None


def _is_model(device_name: str, name: str) -> bool:
    return device_name.startswith(name) and device_name[len(name) : len(name) + 1] in ("", " ", "-")


@functools.cache
def _peak_of_this_device() -> float | None:
    if not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


def _memory() -> list[float | None]:
    """Return the largest share of the device's memory in percent, retries, and OOMs so far."""
    if not torch.cuda.is_available():
        return [None, None, None]
    stats = torch.cuda.memory_stats()
    capacity = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    reserved = stats.get("reserved_bytes.all.peak", 0)
    return [
        100 * reserved / capacity,
        stats.get("num_alloc_retries", 0),
        stats.get("num_ooms", 0),
    ]


def _as_percent(share: float | None) -> float | None:
    return None if share is None else min(100.0, 100 * share)


def _largest_over_ranks(
    local: list[float | None], losses: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the largest figures and losses of all ranks, on the device of the collective.

    Ranks without losses take part with nothing; where ranks have losses of different names, there
    are no largest ones.
    """
    if not is_distributed() or dist.get_world_size() == 1:
        return list(local), {}
    device = comm_device()
    names = list(losses)[:_NUM_LOSSES]
    digest = float(zlib.crc32("\0".join(names).encode()) >> 8) if names else None
    head = [digest, None if digest is None else -digest, *local]
    dtype = widest_float(device)
    vector = torch.full((len(head) + 2 * _NUM_LOSSES,), _NOTHING, dtype=dtype, device=device)
    vector[: len(head)] = torch.tensor([_NOTHING if v is None else v for v in head], dtype=dtype)
    if names:
        present = torch.stack([_on(losses[name], device, dtype) for name in names])
        start = len(head)
        vector[start : start + len(names)] = present.nan_to_num(_NOTHING, math.inf, _NOTHING)
        start += _NUM_LOSSES
        vector[start : start + len(names)] = present.isnan().to(dtype)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    figures = [None if value == _NOTHING else value for value in vector[: len(head)].tolist()]
    largest: dict[str, Any] = {}
    if names and figures[0] is not None and figures[1] == -figures[0]:
        start = len(head)
        is_nan = vector[start + _NUM_LOSSES :] > 0
        for index, name in enumerate(names):
            value = vector[start + index]
            largest[name] = torch.where(is_nan[index], torch.full_like(value, math.nan), value)
    return figures[2:], largest


def _on(loss: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(loss, dtype=dtype, device=device).detach().reshape(())
