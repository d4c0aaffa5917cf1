"""The default random numbers, which each test leaves as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _keep_the_default_numbers() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture(scope="session")
def default_state() -> Callable[[], torch.Tensor]:
    """Reads the state of the default numbers of the default device, by torch alone."""

    def read() -> torch.Tensor:
        device = torch.get_default_device()
        module = torch if device.type == "cpu" else torch.get_device_module(device)
        state: torch.Tensor = module.get_rng_state()
        return state

    return read
