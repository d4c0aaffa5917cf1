"""Energy consumption of the GPUs of a job."""

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


def _open_nvml_reader() -> Callable[[], int]:
    nvml, handle = open_device_handle()
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


class EnergyMonitor:
    """Reads the energy counter of each rank's GPU and sums it over the job.

    Every rank takes part in every sum. If a rank cannot read its GPU, the sum is NaN.

    Args:
        read_mj: Returns the energy in millijoules that this rank's device has used so far. None
            reads the current GPU through NVML.

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
        self._mark_mj: int | None = None  # the counter at the last start or reading
        self._kept_mj = 0  # energy since the last lap, up to the mark
        self._is_known = True  # no reading since the last lap failed
        self._total_j = 0.0

    def setup(self) -> None:
        """Open the sensor and start counting. A failing sensor logs one warning. Never waits."""
        if self._read_mj is None:
            try:
                self._read_mj = _open_nvml_reader()
            except Exception as error:
                logger.warning(
                    "energy is unknown on this rank: %s: %s", type(error).__name__, error
                )
        self.resume()

    def resume(self) -> None:
        """Start counting. No effect while counting."""
        if not self._is_running:
            self._is_running = True
            self._mark_mj = self._read_counter()

    def pause(self) -> None:
        """Stop counting, for example during validation. No effect while stopped."""
        if self._is_running:
            self._keep_stretch()
            self._is_running = False

    def lap(self) -> float:
        """Return the energy of all ranks since the last lap.

        One all-reduce of two int64 over the world group. All ranks call it and get the sum.

        Returns:
            Joules, or NaN if a rank could not read its device.
        """
        if self._is_running:
            self._keep_stretch()
        millijoules, unknown = self._kept_mj, int(not self._is_known)
        if is_distributed():
            device = comm_device(dist.group.WORLD)
            # Integers: a float32 sum over many ranks would lose millijoules.
            sums = torch.tensor([millijoules, unknown], dtype=torch.int64, device=device)
            dist.all_reduce(sums)
            millijoules, unknown = sums.tolist()
        joules = math.nan if unknown else millijoules / 1000
        self._kept_mj = 0
        self._is_known = True
        self._total_j += joules
        return joules

    def get_total(self) -> float:
        """Return the energy of all ranks over all laps, in joules. No communication."""
        return self._total_j

    def shutdown(self) -> None:
        """Stop counting and release the sensor. A second call does nothing."""
        self._is_running = False
        self._read_mj = None

    def _keep_stretch(self) -> None:
        now = self._read_counter()
        if now is None or self._mark_mj is None:
            self._is_known = False
        else:
            self._kept_mj += now - self._mark_mj
        self._mark_mj = now

    def _read_counter(self) -> int | None:
        if self._read_mj is None:
            return None
        try:
            return self._read_mj()
        except Exception as error:
            logger.warning("energy is unknown on this rank: %s: %s", type(error).__name__, error)
            self._read_mj = None
            return None


def open_device_handle(index: int | None = None) -> tuple[Any, Any]:
    """Open NVML for a torch device and return the module and a handle; None is the current device.

    The device is found by its UUID, because the indices of NVML ignore CUDA_VISIBLE_DEVICES.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("NVML needs an NVIDIA GPU, but torch found none")
    require_extra("nvml", "reading the GPU's sensors")
    import pynvml

    pynvml.nvmlInit()
    if index is None:
        index = torch.accelerator.current_device_index()
    device = torch.cuda.get_device_properties(index)
    if " MIG " in device.name:
        raise RuntimeError(f"{device.name} is a part of a GPU, and NVML measures only whole GPUs")
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")
