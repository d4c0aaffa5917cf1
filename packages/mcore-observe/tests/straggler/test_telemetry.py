import logging
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mcore.observe.straggler.telemetry import guard_telemetry, telemetry_of

GPU = torch.device("cuda", 1)
NOTHING = [math.nan] * 4


def is_reading(reading, expected):
    return all(
        math.isnan(value) if math.isnan(wanted) else value == wanted
        for value, wanted in zip(reading, expected, strict=True)
    )


@pytest.fixture
def nvml(monkeypatch):
    """A GPU, and NVML as a module that counts what is asked of it."""
    calls = []

    def answer(name, value):
        def call(*args):
            calls.append(name)
            return value(*args)

        return call

    module = ModuleType("pynvml")
    module.NVML_TEMPERATURE_GPU, module.NVML_CLOCK_SM = 0, 1
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle of {uuid}",
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61 + sensor,
        "nvmlDeviceGetPowerUsage": lambda handle: 601_796,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=3),
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1979 + clock,
    }.items():
        setattr(module, name, answer(name, value))
    module.calls = calls
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"uuid{index}", name="NVIDIA H200"),
    )
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: True)
    return module


def test_nvml_is_read_in_the_right_units(nvml):
    read = telemetry_of(GPU)
    assert nvml.calls == []
    assert read() == (61.0, 601.796, 97.0, 1980.0)
    read()
    assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlDeviceGetHandleByUUID") == 1
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 2


def test_a_sensor_that_fails_in_the_middle_is_asked_no_more(nvml, caplog):
    read = telemetry_of(GPU)
    read()
    failures = []

    def lost(handle):
        failures.append(handle)
        raise OSError("GPU is lost")

    nvml.nvmlDeviceGetPowerUsage = lost
    with caplog.at_level(logging.WARNING, "mcore.observe.straggler"):
        for _ in range(3):
            assert is_reading(read(), [61.0, math.nan, 97.0, 1980.0])
    assert failures == ["handle of GPU-uuid1"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "power (OSError: GPU is lost)" in record.getMessage()


def test_a_lost_gpu_is_one_warning(nvml, caplog):
    read = telemetry_of(GPU)
    read()

    def lost(*args):
        raise OSError("GPU is lost")

    for name in ("Temperature", "PowerUsage", "UtilizationRates", "ClockInfo"):
        setattr(nvml, f"nvmlDeviceGet{name}", lost)
    with caplog.at_level(logging.WARNING, "mcore.observe.straggler"):
        assert is_reading(read(), NOTHING)
        assert is_reading(read(), NOTHING)
    assert len(caplog.records) == 1


def test_nvml_that_cannot_be_opened_is_one_warning_and_one_try(nvml, caplog):
    def broken():
        nvml.calls.append("tried")
        raise RuntimeError("driver mismatch")

    nvml.nvmlInit = broken
    read = telemetry_of(GPU)
    with caplog.at_level(logging.WARNING, "mcore.observe.straggler"):
        for _ in range(3):
            assert is_reading(read(), NOTHING)
    assert nvml.calls == ["tried"]
    assert "driver mismatch" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1


def test_missing_library_names_the_extra(nvml, monkeypatch, caplog):
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: False)
    with caplog.at_level(logging.WARNING, "mcore.observe.straggler"):
        assert is_reading(telemetry_of(GPU)(), NOTHING)
    assert "mcore-observe[nvml]" in caplog.text


def test_rocm_gives_watts_and_0_for_unknown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    values = {"temperature": 55, "power_draw": 700, "utilization": 0, "clock_rate": 2100}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    read = telemetry_of(GPU)
    assert read() == (55.0, 700.0, 0.0, 2100.0)
    for name in ("temperature", "power_draw", "clock_rate"):
        monkeypatch.setattr(torch.cuda, name, lambda index: 0)
    assert is_reading(read(), [math.nan, math.nan, 0.0, math.nan])


def test_without_a_gpu_there_is_nothing_and_no_warning(caplog):
    assert is_reading(telemetry_of(torch.device("cpu"))(), NOTHING)
    assert not caplog.records


@pytest.mark.parametrize("wrong", [lambda: (1, 2, 3), lambda: None, lambda: 1 / 0])
def test_a_users_telemetry_may_fail(wrong, caplog):
    read = guard_telemetry(wrong)
    with caplog.at_level(logging.WARNING, "mcore.observe.straggler"):
        assert is_reading(read(), NOTHING)
        assert is_reading(read(), NOTHING)
    assert len(caplog.records) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu():
    """Sensors of the current GPU lie in the ranges that a GPU can have."""
    pytest.importorskip("pynvml")
    temp_c, power_w, util_pct, clock_mhz = telemetry_of(torch.device("cuda"))()
    assert 0 < temp_c < 120
    assert 1 < power_w < 3000
    assert 0 <= util_pct <= 100
    assert 50 < clock_mhz < 5000
