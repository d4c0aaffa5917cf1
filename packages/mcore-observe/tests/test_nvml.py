import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mcore.observe import EnergyMonitor
from mcore.observe.nvml import open_device_handle


def test_no_gpu(monkeypatch):
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
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-of-{index}")
    )
    monkeypatch.setattr("mcore.observe.extras._has_metadata", lambda name: True)
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
