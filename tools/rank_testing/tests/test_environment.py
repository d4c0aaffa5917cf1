"""The state that a rank finds: variables, path, folder, modules, a server without threads."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rank_testing import run_ranks, server

SEEN_ON_IMPORT = os.environ.get("RANK_TESTING_EXAMPLE")
LOADED_ON_IMPORT = set(sys.modules)


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def variables_everywhere(name: str) -> list[str | None]:
    """The variable in this rank, on import of this file, and in a program of the rank."""
    code = f"import os; print(os.environ.get({name!r}))"
    program = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return [os.environ.get(name), SEEN_ON_IMPORT, program.stdout.strip()]


def describe_rank() -> dict[str, object]:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "cuda is touched": initialized or torch.cuda._is_in_bad_fork(),
        "start method": multiprocessing.get_start_method(),
        "leads a process group": os.getpid() == os.getpgid(0),
        "torch threads": torch.get_num_threads(),
        "loaded before": LOADED_ON_IMPORT.issuperset(server._PRELOADED),
        "folder": os.getcwd(),
        "path": sys.path,
    }


def test_ranks_have_their_numbers() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert run_ranks(variables, 2, *names) == [["0", "0", "2"], ["1", "1", "2"]]


def test_variables_changed_after_the_server_started_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_ranks(dist.get_rank, 1)
    monkeypatch.setenv("RANK_TESTING_EXAMPLE", "later")
    assert run_ranks(variables_everywhere, 1, "RANK_TESTING_EXAMPLE") == [["later"] * 3]
    assert "PATH" in os.environ
    monkeypatch.delenv("PATH")
    assert run_ranks(variables_everywhere, 1, "PATH") == [[None, "later", "None"]]


def test_env_adds_and_removes_variables_for_the_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TESTING_GONE", "x")
    env = {"RANK_TESTING_EXAMPLE": "mine", "RANK_TESTING_GONE": None}
    result = run_ranks(variables, 1, "RANK_TESTING_EXAMPLE", "RANK_TESTING_GONE", env=env)
    assert result == [["mine", None]]
    assert os.environ.get("RANK_TESTING_EXAMPLE") is None
    assert os.environ["RANK_TESTING_GONE"] == "x"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        with pytest.raises(ValueError, match=f"env may not name {name}"):
            run_ranks(variables, 1, name, env={name: "0"})


def test_a_rank_inherits_path_and_folder_but_no_thread_and_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(dist.get_rank, 1)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    expected = {
        "threads of the server": 1,
        "cuda is touched": False,
        "start method": multiprocessing.get_start_method(),
        "leads a process group": True,
        "torch threads": 1,
        "loaded before": True,
        "folder": str(tmp_path),
        "path": sys.path,
    }
    assert run_ranks(describe_rank, 2) == [expected] * 2
