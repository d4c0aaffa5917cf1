"""What a rank finds on entry: variables, path, folder, modules, a server without threads."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rank_testing import run_ranks, server
from rank_testing.server import server_environment, start_context, uses_accelerator

SEEN_ON_IMPORT = os.environ.get("RANK_TESTING_EXAMPLE")


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def seen_by_a_program(name: str) -> str:
    code = f"import os; print(os.environ.get({name!r}))"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def seen_on_import() -> str | None:
    return SEEN_ON_IMPORT


def place() -> tuple[str, list[str]]:
    return os.getcwd(), sys.path


def process_groups() -> tuple[int, int]:
    return os.getpid(), os.getpgid(0)


def threads_of_the_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def default_start_method() -> str:
    return multiprocessing.get_start_method()


def cuda_is_untouched() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not initialized and not torch.cuda._is_in_bad_fork()


def test_ranks_know_their_numbers() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    assert run_ranks(variables, 2, *names) == [["0", "0", "2"], ["1", "1", "2"]]


def test_a_variable_set_after_the_server_started_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(dist.get_rank, 1)
    monkeypatch.setenv("RANK_TESTING_EXAMPLE", "later")
    assert run_ranks(variables, 2, "RANK_TESTING_EXAMPLE") == [["later"], ["later"]]
    assert run_ranks(seen_on_import, 1) == ["later"]
    assert run_ranks(seen_by_a_program, 1, "RANK_TESTING_EXAMPLE") == ["later"]


def test_a_variable_removed_after_the_server_started_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_ranks(dist.get_rank, 1)
    assert "PATH" in os.environ
    monkeypatch.delenv("PATH")
    assert run_ranks(variables, 1, "PATH") == [[None]]
    assert run_ranks(seen_by_a_program, 1, "PATH") == ["None"]


def test_env_adds_and_removes_variables_for_the_ranks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK_TESTING_GONE", "x")
    env = {"RANK_TESTING_EXAMPLE": "mine", "RANK_TESTING_GONE": None}
    result = run_ranks(variables, 1, "RANK_TESTING_EXAMPLE", "RANK_TESTING_GONE", env=env)
    assert result == [["mine", None]]
    assert os.environ.get("RANK_TESTING_EXAMPLE") is None
    assert os.environ["RANK_TESTING_GONE"] == "x"


def test_what_a_server_gets_is_not_seen_by_ranks_that_another_thread_starts_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_ranks(variables, 1)
    names, found = list(server_environment()), []
    expected, ensure_running = variables(*names), server.forkserver.ensure_running
    other = threading.Thread(
        target=lambda: found.extend(run_ranks(variables, 1, *names, init=None))
    )

    def start_the_other_first() -> None:
        monkeypatch.setattr(server.forkserver, "ensure_running", ensure_running)
        other.start()
        time.sleep(0.5)  # in which the other would take its variables if nothing kept it from that
        ensure_running()

    monkeypatch.setattr(server.forkserver, "ensure_running", start_the_other_first)
    run_ranks(dist.get_rank, 1)
    other.join()
    assert found == [expected]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_env_cannot_name_what_the_harness_sets(name: str) -> None:
    with pytest.raises(ValueError, match=f"env may not name {name}"):
        run_ranks(variables, 1, name, env={name: "0"})


def test_path_and_folder_of_the_test_process_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(dist.get_rank, 1)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    ((folder, path),) = run_ranks(place, 1)
    assert folder == str(tmp_path)
    assert path == sys.path


def test_a_rank_leads_a_process_group() -> None:
    for pid, group in run_ranks(process_groups, 2, init=None):
        assert pid == group != os.getpgid(0)


def test_multiprocessing_starts_processes_as_in_the_test() -> None:
    expected = multiprocessing.get_start_method()
    assert run_ranks(default_start_method, 1, init=None) == [expected]


def test_the_server_has_one_thread_and_no_device_state() -> None:
    assert run_ranks(threads_of_the_server, 1) == [1]
    assert run_ranks(cuda_is_untouched, 1) == [True]


def test_torch_is_loaded_before_a_rank_does_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(dist.get_rank, 1)
    (tmp_path / "entry_probe.py").write_text(
        "import sys\ndef report(connection):\n    connection.send(sorted(sys.modules))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import entry_probe  # type: ignore[import-not-found]

    context = start_context("gloo")
    ours, theirs = context.Pipe()
    process = context.Process(target=entry_probe.report, args=(theirs,))
    process.start()
    theirs.close()
    loaded = ours.recv()
    process.join()
    expected = {
        "torch",
        "torch.distributed.tensor",
        "torch._dynamo",
        "pytest",
        "rank_testing.child",
    }
    assert expected <= set(loaded)


@pytest.mark.parametrize(
    ("init", "expected"), [("gloo", False), (None, False), ("cuda:nccl", True)]
)
def test_only_an_accelerators_backend_uses_one(init: str | None, expected: bool) -> None:
    assert uses_accelerator(init) is expected
