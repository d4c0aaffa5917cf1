"""Energy that the GPUs of a job use."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.extras import require_extra
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import is_distributed

logger = logging.getLogger(__name__)


def _nvml_reader() -> Callable[[], int]:
    nvml, handle = open_device_handle()
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


class EnergyMonitor:
    """Reads the energy counter of each rank's GPU and sums it over the job.

    Every rank takes part in every sum, even one that cannot read its GPU; the sum is then NaN.

    Args:
        read_mj: Returns the energy that this rank's device has used so far, in millijoules; None
            asks NVML for the current GPU.

    Example:
        >>> counter = iter([1000, 3500])
        >>> monitor = EnergyMonitor(lambda: next(counter))
        >>> monitor.setup()
        >>> monitor.lap()
        2.5
    """

    def __init__(self, read_mj: Callable[[], int] | None = None) -> None:
        self._read_mj = read_mj
        self._is_running = False
        self._mark_mj: int | None = None  # the counter when the current stretch began
        self._kept_mj = 0  # stretches since the last lap that ended in a pause
        self._is_known = True  # every reading since the last lap worked
        self._total_j = 0.0

    def setup(self) -> None:
        """Open the sensor and start counting; a failing sensor logs one warning. Never waits."""
        if self._read_mj is None:
            try:
                self._read_mj = _nvml_reader()
            except Exception as error:
                logger.warning(
                    "energy is unknown on this rank: %s: %s", type(error).__name__, error
                )
        self.resume()

    def resume(self) -> None:
        """Start counting; no effect while counting."""
        if not self._is_running:
            self._is_running = True
            self._mark_mj = self._reading()

    def pause(self) -> None:
        """Stop counting, for example during validation; no effect while stopped."""
        if self._is_running:
            self._keep_stretch()
            self._is_running = False

    def lap(self) -> float:
        """Return the energy of all ranks since the last lap.

        One all-reduce of two int64 over the world group; all ranks call it and get the sum.

        Returns:
            Joules; NaN when a rank could not read its device.
        """
        if self._is_running:
            self._keep_stretch()
        joules = self._sum_over_ranks()
        self._kept_mj = 0
        self._is_known = True
        self._total_j += joules
        return joules

    def get_total(self) -> float:
        """Return the energy of all ranks over all laps, in joules. No communication."""
        return self._total_j

    def shutdown(self) -> None:
        """Stop counting and release the sensor; a second call does nothing."""
        self._is_running = False
        self._read_mj = None

    def _keep_stretch(self) -> None:
        now = self._reading()
        if now is None or self._mark_mj is None:
            self._is_known = False
        else:
            self._kept_mj += now - self._mark_mj
        self._mark_mj = now

    def _reading(self) -> int | None:
        if self._read_mj is None:
            return None
        try:
            return self._read_mj()
        except Exception as error:
            logger.warning("energy is unknown on this rank: %s: %s", type(error).__name__, error)
            self._read_mj = None
            return None

    def _sum_over_ranks(self) -> float:
        millijoules, unknown = self._kept_mj, int(not self._is_known)
        if is_distributed():
            device = comm_device(dist.group.WORLD)
            sums = torch.tensor([millijoules, unknown], dtype=torch.int64, device=device)
            dist.all_reduce(sums)
            millijoules, unknown = sums.tolist()
        return math.nan if unknown else millijoules / 1000


def open_device_handle(index: int | None = None) -> tuple[Any, Any]:
    """Open NVML for a torch device, None for the current one; return the module and a handle.

    The device is found by its UUID: NVML's indices ignore CUDA_VISIBLE_DEVICES.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("NVML needs an NVIDIA GPU, and torch sees none")
    require_extra("nvml", "reading the GPU's sensors")
    import pynvml

    pynvml.nvmlInit()
    if index is None:
        index = torch.accelerator.current_device_index()
    uuid = torch.cuda.get_device_properties(index).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
