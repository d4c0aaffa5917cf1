"""What the figures were measured on, in the words that go above a table."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path


def describe_machine() -> dict[str, str]:
    """Date, Python, torch, processor and load, as label and text.

    torch is looked up by its distribution metadata and not imported.

    Example:
        >>> list(describe_machine())
        ['date', 'Python', 'torch', 'CPUs', 'load average']
    """
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _distribution_version("torch"),
        "CPUs": f"{os.cpu_count()} x {_processor()}",
        "load average": _load_average(),
    }


def _distribution_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """The model name where the system tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        label, _, text = line.partition(":")
        if label.strip() == "model name":
            return text.strip()
    return platform.machine()


def _load_average() -> str:
    try:
        return " ".join(f"{load:.2f}" for load in os.getloadavg())
    except (AttributeError, OSError):
        return "unknown"
