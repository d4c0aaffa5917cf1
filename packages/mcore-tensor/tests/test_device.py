import pytest
import torch

from mcore.tensor import current_device, resolve_device

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: which accelerator is current"
)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without accelerator")
def test_without_an_accelerator_the_cpu_is_current():
    assert current_device() == torch.device("cpu")
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(ValueError, match="index of an accelerator and none is available"):
        resolve_device(0)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_cpu_has_no_index(device):
    assert resolve_device(device) == torch.device("cpu")
    assert resolve_device(device).index is None


def test_other_devices_keep_their_index():
    assert resolve_device("xla:3") == torch.device("xla", 3)
    assert resolve_device("meta") == torch.device("meta")


def test_an_accelerator_without_an_index_is_the_current_one(monkeypatch):
    monkeypatch.setattr("mcore.tensor.device.current_device", lambda: torch.device("cuda", 2))
    assert resolve_device("cuda") == torch.device("cuda", 2)
    assert resolve_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert resolve_device("xpu") == torch.device("xpu")


def test_unknown_device_types_are_refused_by_torch():
    with pytest.raises(RuntimeError, match="nonsense"):
        resolve_device("nonsense")


@pytest.mark.cuda
@needs_cuda
def test_an_accelerator_is_current_and_followed():
    """Checks that the current device has its index and follows a switch of device."""
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        assert current_device() == torch.device("cuda", last)
        assert resolve_device("cuda") == torch.device("cuda", last)
        assert resolve_device(0) == torch.device("cuda", 0)
