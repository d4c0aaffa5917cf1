"""The threads of a rank: as many as the user set, else its part of the CPUs that it may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def choose_threads(root: Path = Path("/")) -> tuple[int, str]:
    """The number of threads of this rank and the reason. ``root`` has ``proc`` and ``sys``."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given):
        return int(given), "OMP_NUM_THREADS"
    is_bound = hasattr(os, "sched_getaffinity")
    usable: float = len(os.sched_getaffinity(0)) if is_bound else os.cpu_count() or 1
    reason = f"usable CPUs: {usable}"
    quota = min(_read_quotas(root), default=usable)
    if quota < usable:
        usable, reason = quota, f"quota of CPUs: {quota:g}"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(usable) // ranks), f"{reason}, ranks on this machine: {ranks}"


def _read_quotas(root: Path) -> Iterator[float]:
    """The CPUs that each control group of this process may use. Nothing outside Linux."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            is_old = "cpu" in controllers.split(",")  # named cpu,cpuacct or cpuacct,cpu too
            mount = root / "sys/fs/cgroup" / ("cpu" if is_old else "")
            group = mount / path.lstrip("/")
            while (is_old or not controllers) and group.is_relative_to(mount):
                with suppress(OSError, ValueError):
                    yield _read_quota(group, is_old=is_old)
                group = group.parent


def _read_quota(group: Path, *, is_old: bool) -> float:
    """The quota of one group. Raises ValueError for an unlimited group."""
    if is_old:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        quota, period = (group / "cpu.max").read_text().split()
    if int(quota) <= 0:
        raise ValueError(quota)
    return int(quota) / int(period)
