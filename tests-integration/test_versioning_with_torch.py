"""Tests together with the real torch: its version, its modules, its process groups."""

import copy
import io
import logging
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from packaging.version import Version

from mcore.versioning import (
    ExperimentalNotEnabledError,
    clear_version_cache,
    deprecated,
    experimental_cls,
    experimental_enabled,
    experimental_fn,
    get_torch_version,
    is_torch_min_version,
    set_experimental_flag,
)
from mcore.versioning.process_rank import process_rank
from rank_testing import run_ranks


@experimental_cls("0.1.0")
class Doubling(torch.nn.Module):
    """A layer with one parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * self.weight


def test_version_is_that_of_torch() -> None:
    assert get_torch_version() == Version(str(torch.__version__))
    assert is_torch_min_version(str(torch.__version__)) is True
    assert is_torch_min_version(Version(str(torch.__version__)).public, False) is False
    assert is_torch_min_version("1.0") is is_torch_min_version("1.0") is True
    assert is_torch_min_version("1000") is False


def test_version_is_the_same_before_torch_is_loaded() -> None:
    code = (
        "import sys, mcore.versioning as v; print(v.get_torch_version());"
        "assert 'torch' not in sys.modules"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert Version(finished.stdout) == Version(str(torch.__version__))


def test_patched_torch_version_counts_after_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0a0+50eac811a6.nv25.09")
    clear_version_cache()
    assert is_torch_min_version("2.9.0") is False
    assert is_torch_min_version("2.9.0", release_only=True) is True


def test_gated_module_is_an_ordinary_module() -> None:
    with pytest.raises(ExperimentalNotEnabledError):
        Doubling(2)
    with experimental_enabled():
        layer = Doubling(2)
        stack = torch.nn.Sequential(layer, Doubling(2))
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(stack(x), 4 * x)
    assert list(stack.state_dict()) == ["0.weight", "1.weight"]
    stack(x).sum().backward()
    assert torch.equal(layer.weight.grad, 4 * x)
    again = copy.deepcopy(layer)
    assert type(again) is Doubling
    assert again.weight is not layer.weight


def test_gated_module_is_saved_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules.get(__name__) or sys.modules[Doubling.__module__]
    monkeypatch.setitem(sys.modules, __name__, module)
    with experimental_enabled():
        layer = Doubling(2)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert type(again) is Doubling
    assert torch.equal(again.weight, layer.weight)


def test_deprecated_module_warns_once_and_works() -> None:
    @deprecated("1.0.0", alternative="torch.nn.Linear")
    class OldLinear(torch.nn.Linear): ...

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = OldLinear(2, 3, bias=False)
        copy.deepcopy(layer)
    messages = [str(w.message) for w in caught if w.category is DeprecationWarning]
    assert len(messages) == 1
    assert "Use torch.nn.Linear instead." in messages[0]
    assert layer(torch.ones(4, 2)).shape == (4, 3)


def _rank_and_records() -> tuple[int, int, list[str]]:
    """What one rank of a process group finds, with an environment that says something else."""
    os.environ["RANK"] = "7"
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore.versioning")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    set_experimental_flag(True)

    @experimental_fn("0.1.0", current_version="0.9.0")
    def compute() -> int:
        return 5

    return process_rank(), compute(), records


def test_rank_of_the_process_group_decides_who_logs() -> None:
    results: list[Any] = run_ranks(_rank_and_records, 2, timeout_s=60)
    assert [(rank, value) for rank, value, _ in results] == [(0, 5), (1, 5)]
    first, second = (records for _, _, records in results)
    assert len(first) == 2
    assert "has reached end of life" in first[0]
    assert first[1].startswith("ENABLE_EXPERIMENTAL is True, running experimental code.")
    assert second == []
