"""What the tests of this package share: worlds of many ranks that one process can play."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.process_groups import clear_default_process_groups
from mcore.parallel.rng import shared
from mcore.parallel.torch_compat import can_order_ranks
from standin.guard import find_problem
from standin.plugin import accelerator_fixture, device_fixture, on_each_device  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ordered_ranks: makes a group with new_group(sort_ranks=)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ordered_ranks") and not can_order_ranks():
        pytest.skip("is about groups in another order, which this version of torch sorts")


@pytest.fixture(params=["gloo", "standin:standin_nccl"])
def backend_of_ranks(request: pytest.FixtureRequest) -> str:
    """What ranks join: gloo on the CPU, then the group of the stand-in, with a device each."""
    if request.param != "gloo" and find_problem() is not None:
        pytest.skip(f"no stand-in accelerator: {find_problem()}")
    name: str = request.param
    return name


@pytest.fixture
def no_tracker_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a new process: no shared tracker; default numbers come back afterwards."""
    monkeypatch.setattr(shared, "_shared", None)
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture
def fake_world() -> Iterator[Callable[[int, int], None]]:
    """Become one rank of a world whose collectives do nothing: groups, shapes, never values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world_size: int, backend: str = "fake") -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    clear_default_process_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
