"""Facts that figures depend on: the time, the processor, the versions and the load."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path


def describe_machine(*distributions: str) -> dict[str, str]:
    """Python, torch, further distributions and the processor, as label and text.

    Versions are read from metadata: nothing is imported.
    """
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: _read_version(name) for name in ("torch", *distributions)},
        "CPUs": f"{os.cpu_count()} x {_find_processor()}",
    }


def join_facts(facts: dict[str, str]) -> str:
    """Facts as one line."""
    return ", ".join(f"{label}: {text}" for label, text in facts.items())


def timestamp() -> str:
    """The date and the time of day, UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load_average() -> str:
    """The number of processes that wanted a core in the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _read_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _find_processor() -> str:
    """The model name if the system has it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
