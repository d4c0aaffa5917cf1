"""Fixtures: ``device`` is the CPU and then the stand-in, ``accelerator`` the stand-in alone."""

from collections.abc import Iterator

import pytest
import torch

from standin.backend import register, switched_on
from standin.guard import find_problem
from standin.memory import NAME
from standin.recording import recorded

PROBLEM = find_problem()
if PROBLEM is None:
    register()  # torch counts devices at the first backward pass of the process


@pytest.fixture(name="accelerator")
def accelerator_fixture() -> Iterator[torch.device]:
    """Device 0 of the stand-in, which is the accelerator during the test."""
    if PROBLEM is not None:
        pytest.skip(f"no stand-in accelerator: {PROBLEM}")
    with switched_on() as device:
        yield device


@pytest.fixture(name="device", params=["cpu", NAME])
def device_fixture(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, then device 0 of the stand-in. Tensors without a device are still of the CPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    found: torch.device = request.getfixturevalue("accelerator")
    return found


@pytest.fixture
def on_each_device(device: torch.device) -> Iterator[None]:
    """Run a test on the CPU, then with the stand-in as default device of new tensors.

    A test that does no work on the stand-in fails, since it would test the CPU twice.
    """
    if device.type == "cpu":
        yield
        return
    with device, recorded() as record:
        yield
    assert record.ops, "the test ran nothing on the stand-in"
