"""What figures depend on: the time, the processor, the versions and the load."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path


def machine(*distributions: str) -> dict[str, str]:
    """Python, torch, further distributions and the processor, as label and text.

    The versions are those of the metadata: nothing is imported.
    """
    return {
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: _version(name) for name in ("torch", *distributions)},
        "CPUs": f"{os.cpu_count()} x {_processor()}",
    }


def joined(facts: dict[str, str]) -> str:
    """Facts as one line."""
    return "; ".join(f"{label}: {text}" for label, text in facts.items())


def now() -> str:
    """The date and the time of day, UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load_average() -> str:
    """How many processes wanted a core in the last minute."""
    try:
        return f"{os.getloadavg()[0]:.1f}"
    except (AttributeError, OSError):
        return "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
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
