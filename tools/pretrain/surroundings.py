"""What a run was started with besides its settings: versions, host, commit."""

from __future__ import annotations

import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path

_DISTRIBUTIONS = ("torch", "numpy", "mlflow", "tensorboard")
_PARTS = ("versioning", "tensor", "parallel", "modules", "observe")


def surroundings() -> dict[str, str | None]:
    """Versions of Python, torch and the packages, the host and the commit; None where unknown."""
    names = (*_DISTRIBUTIONS, *(f"mcore-{part}" for part in _PARTS))
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in names},
        "host": socket.gethostname(),
        "commit": _commit(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this code, with a plus where files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
