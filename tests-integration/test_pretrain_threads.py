"""The threads of the main job's ranks: the user's number, or their part of the usable CPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pretrain.threads import choose_threads
from pretrain_runs import TINY, environment, last_value, launcher


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight CPUs with four ranks."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def write_group(root: Path, line: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": line, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_ranks_of_a_machine_share_the_usable_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_threads(tmp_path) == (2, "usable CPUs: 8, ranks on this machine: 4")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert choose_threads(tmp_path) == (1, "usable CPUs: 1, ranks on this machine: 4")


@pytest.mark.parametrize(
    ("line", "files", "threads", "quota"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 1, "quota of CPUs: 4"),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 2, "usable CPUs: 8"),
        (
            "0::/job/step\n",
            {"sys/fs/cgroup/job/cpu.max": "650000 100000\n",
             "sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, 1, "quota of CPUs: 6.5",
        ),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n",
            {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "500000\n",
             "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 1, "quota of CPUs: 5",
        ),
        (
            "4:cpuacct,cpu:/docker/a\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "450000\n",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 1, "quota of CPUs: 4.5",
        ),
        (
            "4:cpu,cpuacct:/a\n",
            {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
             "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 2, "usable CPUs: 8",
        ),
    ],
)  # fmt: skip
def test_a_quota_of_any_group_counts(
    line: str, files: dict[str, str], threads: int, quota: str, tmp_path: Path
) -> None:
    found = choose_threads(write_group(tmp_path, line, files))
    assert found == (threads, f"{quota}, ranks on this machine: 4")


def test_the_number_of_the_user_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, threads in (("3", 3), ("16,2", 16)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert choose_threads(tmp_path) == (threads, "OMP_NUM_THREADS")
    for unusable in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", unusable)
        assert choose_threads(tmp_path)[0] == 2


@pytest.mark.slow
def test_a_command_bound_to_one_cpu_sets_and_reports_one_thread(tmp_path: Path) -> None:
    """As by taskset. Another test gives the command a number."""
    words = (*TINY, "--train-iters", "1", "--ranks", "1", "--no-mlflow", "--no-tensorboard")
    code = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    env = {**environment(), "PATH": os.environ["PATH"]}
    env.pop("OMP_NUM_THREADS", None)
    bound = launcher(tmp_path, "pretrain", *words, first=code, env=env).wait(600)
    assert bound.returncode == 0, (sys.executable, bound.stderr)
    said = ", 1 thread a rank (usable CPUs: 1, ranks on this machine: 1)"
    assert last_value(bound.stdout, "device").endswith(said)
