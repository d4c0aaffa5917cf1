"""Temperature, power, utilisation and clock of the GPU. A value that cannot be read is NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from mcore.observe.reports import open_device_handle

logger = logging.getLogger("mcore.observe.straggler")

Reading: TypeAlias = tuple[float, ...]  # C, W, %, MHz

_SENSOR_NAMES = ("temperature", "power", "utilisation", "clock")
_NOTHING: Reading = (math.nan,) * 4


def telemetry_of(device: torch.device) -> Callable[[], Reading]:
    """Return a function that reads a device and never raises. Unknown values are NaN.

    It reads NVML on NVIDIA, amdsmi through torch on ROCm, else nothing. A device without an index
    is the current device at the first reading.
    """
    if device.type == "cpu" or not torch.cuda.is_available():
        return lambda: _NOTHING
    if torch.version.hip is not None:
        return Sensors(lambda: _open_rocm_sensors(device.index)).read
    return Sensors(lambda: _open_nvml_sensors(device.index)).read


def guard_telemetry(telemetry: Callable[[], Sequence[float]]) -> Callable[[], Reading]:
    """Wrap a user's telemetry. Its first failure is a warning, and it returns NaN from then on."""
    source: Callable[[], Sequence[float]] | None = telemetry

    def read() -> Reading:
        nonlocal source
        if source is None:
            return _NOTHING
        try:
            temp_c, power_w, util_pct, clock_mhz = (float(value) for value in source())
        except Exception as error:
            source = None
            _warn(f"telemetry ({_describe(error)})")
            return _NOTHING
        return temp_c, power_w, util_pct, clock_mhz

    return read


class Sensors:
    """Four sensors, opened at the first reading. A sensor that fails is NaN from then on."""

    def __init__(self, open_sensors: Callable[[], Sequence[Callable[[], float]]]) -> None:
        self._open_sensors = open_sensors
        self._sensors: list[Callable[[], float] | None] | None = None

    def read(self) -> Reading:
        """Read all sensors. New failures are reported in one warning."""
        if self._sensors is None:
            try:
                self._sensors = list(self._open_sensors())
            except Exception as error:
                _warn(f"all sensors ({_describe(error)})")
                self._sensors = [None] * 4
        failures: list[str] = []
        values = [math.nan] * 4
        for number, sensor in enumerate(self._sensors):
            if sensor is None:
                continue
            try:
                values[number] = float(sensor())
            except Exception as error:
                self._sensors[number] = None
                failures.append(f"{_SENSOR_NAMES[number]} ({_describe(error)})")
        if failures:
            _warn(", ".join(failures))
        return tuple(values)


def _warn(sensors: str) -> None:
    logger.warning("straggler: cannot read the GPU: %s; reported as NaN from now on", sensors)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _open_nvml_sensors(index: int | None) -> list[Callable[[], float]]:
    nvml, handle = open_device_handle(index)
    return [
        lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
        lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    ]


def _open_rocm_sensors(index: int | None) -> list[Callable[[], float]]:
    """Temperature is that of the junction sensor. Power is in watts. 0 means unknown."""
    cuda: Any = torch.cuda
    return [
        lambda: cuda.temperature(index) or math.nan,
        lambda: cuda.power_draw(index) or math.nan,
        lambda: cuda.utilization(index),
        lambda: cuda.clock_rate(index) or math.nan,
    ]
