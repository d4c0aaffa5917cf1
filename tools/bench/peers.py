"""megatron-core and simulated ranks, as several suites need them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch.distributed as dist


def name_of(distribution: str = "megatron-core") -> str:
    """A peer with its version. A missing peer is a ``ModuleNotFoundError``."""
    return f"{distribution} {version(distribution)}"


def megatron(module: str) -> Any:
    """A module of megatron-core, imported without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{module}")


@contextmanager
def simulated_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world whose collectives return at once, with this rank's data."""
    # torch keeps this store for its own tests, so the import is here.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def megatron_groups() -> Iterator[None]:
    """Have megatron-core make its process groups, all data-parallel."""
    groups = megatron("parallel_state")
    try:
        groups.initialize_model_parallel(create_gloo_process_groups=False)
        yield
    finally:
        groups.destroy_model_parallel()
