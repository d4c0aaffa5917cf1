import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.observe import EnergyMonitor
from mcore.observe.reports import open_device_handle
from rank_testing import run_ranks


def counting(*readings):
    values = iter(readings)
    return EnergyMonitor(lambda: next(values))


def test_laps_and_total():
    monitor = counting(1000, 3500, 4500)
    monitor.setup()
    assert monitor.lap() == 2.5
    assert monitor.lap() == 1.0
    assert monitor.get_total() == 3.5


def test_a_pause_does_not_count():
    monitor = counting(0, 1000, 50_000, 50_500)
    monitor.setup()
    monitor.pause()
    monitor.pause()
    monitor.resume()
    monitor.resume()
    assert monitor.lap() == 1.5


def test_a_sensor_that_fails_is_one_warning_and_nan(caplog):
    def broken():
        raise OSError("no sensor")

    monitor = EnergyMonitor(broken)
    monitor.setup()
    assert math.isnan(monitor.lap())
    assert math.isnan(monitor.lap())
    assert len(caplog.records) == 1


def test_no_gpu_is_one_warning_and_nan(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monitor = EnergyMonitor()
    monitor.setup()
    assert math.isnan(monitor.lap())
    assert len(caplog.records) == 1
    monitor.shutdown()
    monitor.shutdown()


def two_ranks(broken_rank):
    rank = dist.get_rank()
    readings = iter([0, 1000 * (rank + 1), 1000 * (rank + 1)])

    def read():
        if rank == broken_rank:
            raise OSError("no sensor")
        return next(readings)

    monitor = EnergyMonitor(read)
    monitor.setup()
    return monitor.lap()


def test_all_ranks_get_the_sum():
    assert run_ranks(two_ranks, 2, None) == [3.0, 3.0]


def test_a_rank_without_a_sensor_makes_the_sum_unknown_and_nobody_waits():
    assert all(math.isnan(joules) for joules in run_ranks(two_ranks, 2, 1))


def test_nvml_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        open_device_handle()


def test_the_device_is_found_by_its_uuid(monkeypatch):
    pynvml = ModuleType("pynvml")
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlDeviceGetHandleByUUID = lambda uuid: ("handle", uuid)
    energy = iter([5000, 9000])
    pynvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(energy)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    names = {3: "NVIDIA H100", 4: "NVIDIA H100 MIG 1g.10gb"}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=f"uuid-of-{index}", name=names[index]),
    )
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: True)
    with pytest.raises(RuntimeError, match=r"MIG 1g\.10gb is a part of a GPU"):
        open_device_handle(4)
    assert open_device_handle() == (pynvml, ("handle", "GPU-uuid-of-3"))
    monitor = EnergyMonitor()
    monitor.setup()
    assert monitor.lap() == 4.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_gpu_uses_energy():
    """The counter of the device that torch uses rises while it works."""
    pytest.importorskip("pynvml")
    monitor = EnergyMonitor()
    monitor.setup()
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        matrix = (matrix @ matrix).tanh()
    torch.cuda.synchronize()
    assert monitor.lap() > 0
