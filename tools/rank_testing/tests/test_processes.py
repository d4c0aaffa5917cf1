"""No process survives pytest, and test files of the same name do not clash."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import rank_testing
from rank_testing.tests.living import is_living, wait_until

TOOLS = Path(rank_testing.__file__).parents[1]
MARGIN_S = 60.0
START_S = 300.0  # pytest and a server import much: slow on a busy machine

HANGING_TEST = """
import os, subprocess, time
from pathlib import Path
from rank_testing import run_ranks

def wait_forever(folder):
    import torch, torch.distributed as dist
    rank = dist.get_rank()
    program = subprocess.Popen(["sleep", "600"])
    pids = os.getpid(), os.getppid(), program.pid
    Path(folder, f"new{rank}").write_text(" ".join(map(str, pids)))
    os.rename(Path(folder, f"new{rank}"), Path(folder, f"started{rank}"))
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))

def test_hang():
    run_ranks(wait_forever, 2, os.environ["RANK_TESTING_FOLDER"], timeout_s=600)
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


def start_pytest(folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "RANK_TESTING_FOLDER": str(folder)}
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "--import-mode=importlib"),
                *("-o", f"pythonpath={TOOLS}", "--rootdir", str(folder)),
                *("-p", "no:cacheprovider"),
            ],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def read_log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_nothing_survives_when_pytest_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(HANGING_TEST)
    process = start_pytest(tmp_path)
    started = [tmp_path / f"started{rank}" for rank in range(2)]
    try:
        have_started = wait_until(lambda: all(path.exists() for path in started), START_S)
        assert have_started, read_log(tmp_path)
        family = {int(pid) for path in started for pid in path.read_text().split()}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(family) == 5  # the fork server, two ranks and the program of each
    assert wait_until(lambda: not any(map(is_living, family)), MARGIN_S)


def test_same_named_files_run_together_and_leave_nothing(tmp_path: Path) -> None:
    for number, package in enumerate(("one", "two-dashed", "three")):
        folder = tmp_path / package / "tests"
        folder.mkdir(parents=True)
        (folder / "test_same.py").write_text(SAME_NAME_TEST.format(factor=number + 1))
        (folder / "conftest.py").write_text(CONFTEST)
    process = start_pytest(tmp_path)
    assert process.wait(START_S) == 0, read_log(tmp_path)
    assert "3 passed" in read_log(tmp_path)
    servers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(servers) == 1
    assert wait_until(lambda: not is_living(servers[0]), MARGIN_S)
