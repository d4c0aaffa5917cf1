import pytest
import torch

from standin.plugin import accelerator_fixture, device_fixture  # noqa: F401


@pytest.fixture(autouse=True)
def same_draws():
    """Random numbers are those of the test, whatever its worker has run before."""
    torch.manual_seed(0)
