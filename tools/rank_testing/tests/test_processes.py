"""No process is left behind, whatever becomes of pytest, and same-named test files get along."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rank_testing

TOOLS = Path(rank_testing.__file__).parents[1]
MARGIN_S = 60.0
START_S = 300.0  # pytest and a server import much, which takes long on a busy machine

HANGING_TEST = """
import os, subprocess, time
from pathlib import Path
from rank_testing import run_ranks

def wait_for_ever(folder):
    import torch, torch.distributed as dist
    rank = dist.get_rank()
    program = subprocess.Popen(["sleep", "600"])
    Path(folder, f"started{rank}").touch()
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))

def test_hang():
    run_ranks(wait_for_ever, 2, os.environ["RANK_TESTING_FOLDER"], timeout_s=600)
"""

SAME_NAME_TEST = """
import os, sys
from pathlib import Path
from rank_testing import preload, run_ranks

FACTOR = {factor}
preload("tabnanny", "not_installed_anywhere")
SEEN = set(sys.modules)

class Product(int):
    pass

def multiplied():
    assert "tabnanny" in SEEN
    assert not any(name.partition(".")[0] in ("mcore", "conftest") for name in SEEN)
    import torch, torch.distributed as dist
    total = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(total)
    Path(os.environ["RANK_TESTING_FOLDER"], str(os.getppid())).touch()
    server_threads = os.listdir(f"/proc/{{os.getppid()}}/task")
    return Product(int(total) * FACTOR), len(server_threads)

def test_ranks_run_their_own_file():
    results = run_ranks(multiplied, 2)
    assert results == [(2 * FACTOR, 1)] * 2
    assert {{type(product) for product, _ in results}} == {{Product}}
"""

# Ranks load the file of their function, and no conftest.
CONFTEST = """
import os
if "RANK" in os.environ:
    raise RuntimeError("a rank loaded conftest.py")
"""


def start_pytest(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "RANK_TESTING_FOLDER": str(folder)}
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "--import-mode=importlib"),
                *("-o", f"pythonpath={TOOLS}", "--rootdir", str(folder)),
                *("-p", "no:cacheprovider", *arguments),
            ],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def living() -> dict[int, tuple[int, str]]:
    """Return the parent and the start time of each process that is not a zombie, by its number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def descendants(pid: int) -> dict[int, str]:
    """Return the start times of all processes below `pid`, by their numbers."""
    processes = living()
    family: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {child for child, (parent, _) in processes.items() if parent in parents}
        family |= {child: processes[child][1] for child in children}
        parents = children
    return family


def survivors(family: dict[int, str]) -> set[int]:
    processes = living()
    return {pid for pid, start in family.items() if processes.get(pid, (0, ""))[1] == start}


def test_nothing_survives_when_pytest_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(HANGING_TEST)
    process = start_pytest(tmp_path)
    started = [tmp_path / f"started{rank}" for rank in range(2)]
    try:
        assert wait_until(lambda: all(path.exists() for path in started), START_S), log_of(tmp_path)
        family = descendants(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # The fork server, multiprocessing's resource tracker, two ranks and the program of each.
    assert len(family) == 6
    assert wait_until(lambda: not survivors(family), MARGIN_S)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--capture=no"], id="serial"),
        pytest.param(["-n", "1"], id="xdist", marks=pytest.mark.slow),
    ],
)
def test_same_named_files_run_together_and_leave_nothing(
    tmp_path: Path, arguments: list[str]
) -> None:
    for number, package in enumerate(("one", "two-dashed", "three")):
        folder = tmp_path / package / "tests"
        folder.mkdir(parents=True)
        (folder / "test_same.py").write_text(SAME_NAME_TEST.format(factor=number + 1))
        (folder / "conftest.py").write_text(CONFTEST)
    process = start_pytest(tmp_path, *arguments)
    assert process.wait(START_S) == 0, log_of(tmp_path)
    assert "3 passed" in log_of(tmp_path)
    servers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(servers) == 1
    assert wait_until(lambda: not set(servers) & set(living()), MARGIN_S)


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()


def test_the_last_resort_ends_a_process_that_runs_no_python_code(tmp_path: Path) -> None:
    code = (
        "import itertools\n"
        "from rank_testing.orphans import end_at_the_latest\n"
        f"with open({str(tmp_path / 'stacks')!r}, 'w') as file:\n"
        "    end_at_the_latest(0.5, file)\n"
        "    sum(itertools.repeat(0))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(TOOLS)}
    )
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
    assert 'File "<string>", line 5 in <module>' in (tmp_path / "stacks").read_text()
