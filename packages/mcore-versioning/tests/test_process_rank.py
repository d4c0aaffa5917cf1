"""Tests of the rank that decides who writes a log record."""

import logging
import sys
import types

import pytest

from mcore.versioning.process_rank import log_on_rank_zero, process_rank, process_world_size


def _distributed(*, available: bool, initialised: bool, rank: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: initialised, get_rank=lambda: rank
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "5"}, 5),
        ({"RANK": "3", "SLURM_PROCID": "5"}, 3),
        ({"RANK": "three", "SLURM_PROCID": "5"}, 5),
        ({"RANK": "", "SLURM_PROCID": "1.5"}, 0),
    ],
)
def test_rank_from_the_environment(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert process_rank() == expected


def test_process_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _distributed(available=True, initialised=True, rank=7)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("RANK", "3")
    assert process_rank() == 7


@pytest.mark.parametrize(
    "module",
    [
        None,
        types.ModuleType("torch.distributed"),  # while torch is being imported
        _distributed(available=False, initialised=True, rank=7),
        _distributed(available=True, initialised=False, rank=7),
    ],
)
def test_unusable_process_group_falls_back_to_the_environment(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    monkeypatch.setenv("RANK", "3")
    assert process_rank() == 3


def test_only_rank_zero_logs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        log_on_rank_zero(logging.INFO, f"from rank {rank}")
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [
        ("mcore.versioning", "INFO", "from rank 0")
    ]


def test_a_process_without_a_known_rank_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    with caplog.at_level(logging.INFO, logger="mcore.versioning"):
        log_on_rank_zero(logging.INFO, "from the only process")
    assert caplog.messages == ["from the only process"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8"}, 8),
        ({"SLURM_NTASKS": "16"}, 16),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "16"}, 8),
        ({"WORLD_SIZE": "many", "SLURM_NTASKS": "16"}, 16),
    ],
)
def test_world_size_from_the_environment(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert process_world_size() == expected


def test_world_size_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _distributed(available=True, initialised=True, rank=7)
    group.get_world_size = lambda: 9
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert process_world_size() == 9
