import pytest
import torch

from standin.plugin import accelerator_fixture, device_fixture, on_each_device  # noqa: F401


@pytest.fixture(autouse=True)
def same_draws():
    """Random numbers are those of the test, whatever its worker has run before."""
    torch.manual_seed(0)
