"""Fixtures: ``device`` is the CPU and then the accelerator, ``accelerator`` that alone.

The accelerator is the first GPU, whose tests are marked, or on a machine without one the stand-in.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from standin.backend import register, switched_on
from standin.guard import find_problem
from standin.memory import NAME
from standin.recording import recorded

KIND = "cuda" if torch.cuda.is_available() else NAME
NCCL = "nccl" if KIND == "cuda" else f"{NAME}_nccl"  # the backend for groups of such devices
PROBLEM = find_problem()
_PARAM = pytest.param("cuda:0", marks=pytest.mark.cuda) if KIND == "cuda" else NAME
if PROBLEM is None:
    register()  # torch counts devices at the first backward pass of the process


@pytest.fixture(name="accelerator", params=[_PARAM])
def accelerator_fixture(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Device 0 of the accelerator. The stand-in is switched on during the test."""
    yield from _use(request.param)


@pytest.fixture(name="device", params=["cpu", _PARAM])
def device_fixture(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, then device 0 of the accelerator. Tensors without a device are still of the CPU."""
    yield from _use(request.param)


def _use(kind: str) -> Iterator[torch.device]:
    if kind == NAME and PROBLEM is not None:
        pytest.skip(f"no stand-in accelerator: {PROBLEM}")
    with switched_on() if kind == NAME else nullcontext(torch.device(kind)) as device:
        yield device


@pytest.fixture
def on_each_device(device: torch.device) -> Iterator[None]:
    """Run a test on the CPU, then with the accelerator as default device of new tensors.

    A test that does no work on the stand-in fails, since it would test the CPU twice.
    """
    if device.type == "cpu":
        yield
        return
    with device, recorded() as record:
        yield
    assert record.ops or device.type != NAME, "the test ran nothing on the stand-in"
