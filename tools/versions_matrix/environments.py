"""Throwaway virtual environments, made by uv where it is there, else by venv and pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def find_uv() -> list[str] | None:
    """The command that starts uv, None where there is none.

    It is looked for on `PATH`, where hatch says it is, beside this Python, and as its module.
    """
    beside = str(Path(sys.executable).with_name("uv"))
    commands = (
        [shutil.which("uv")],
        [os.environ.get("HATCH_UV")],
        [beside],
        [sys.executable, "-m", "uv"],
    )
    for first, *rest in commands:
        if first and _works([first, *rest, "--version"]):
            return [first, *rest]
    return None


def make_environment(
    folder: Path, interpreter: Path, requirements: Sequence[str], uv: Sequence[str] | None
) -> Path:
    """Make a virtual environment and install into it.

    Args:
        folder: Where to make it; must not exist.
        interpreter: The Python to base it on.
        requirements: What to install: names, or paths of projects.
        uv: The command that starts uv; None takes `venv` and pip.

    Returns:
        The Python of the environment.

    Raises:
        subprocess.CalledProcessError: A step failed; its output has been printed.
    """
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = folder / scripts / "python"
    steps: list[list[str | Path]]
    if uv is None:
        steps = [
            [interpreter, "-m", "venv", folder],
            [python, "-m", "pip", "install", "--quiet", *requirements],
        ]
    else:
        steps = [
            [*uv, "venv", "--quiet", "--python", interpreter, folder],
            [*uv, "pip", "install", "--quiet", "--python", python, *requirements],
        ]
    for step in steps:
        subprocess.run(step, check=True, env=clean_environment())
    return python


def clean_environment() -> dict[str, str]:
    """The environment variables without those that would lead into another installation."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
