"""A virtual environment made by uv that sees nothing of the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_LIST_INSTALLED = """
import importlib.metadata, json
every = importlib.metadata.distributions()
print(json.dumps({each.metadata["Name"]: each.version for each in every}))
"""


class InstallError(RuntimeError):
    """What was asked for cannot be installed; the text has the installer's output."""


@dataclass(frozen=True)
class CleanVenv:
    """A virtual environment.

    Attributes:
        folder: Where it lies.
        uv: The command that starts uv.
        constraints: Lines of a constraints file that every installation obeys.
        options: What else every installation is told, such as the address of an index.
    """

    folder: Path
    uv: str
    constraints: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def install(self, requirements: Iterable[str], *, compiled: bool = False) -> None:
        """Install requirements, and what they need, at the newest versions that fit."""
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(self.constraints) + "\n", encoding="utf-8")
        compiling = ["--compile-bytecode"] if compiled else []
        _run_uv(
            [
                self.uv, "pip", "install", "--quiet", "--python", str(self.python),
                "--constraints", str(constraints), *compiling, *self.options, *requirements,
            ]
        )  # fmt: skip

    def lowest_versions(self, requirements: Iterable[str]) -> dict[str, str]:
        """The lowest available version of each requirement, whatever the others allow."""
        wanted = self.folder / "wanted.txt"
        wanted.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        found = _run_uv(
            [
                self.uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate",
                "--no-strip-extras", "--python", str(self.python),
                "--resolution", "lowest", str(wanted),
            ]
        )  # fmt: skip
        pins = (Requirement(line) for line in found.splitlines())
        return {
            canonicalize_name(pin.name): next(iter(pin.specifier)).version
            for pin in pins
            if pin.marker is None or pin.marker.evaluate()
        }

    def installed(self) -> dict[str, str]:
        """The version of every distribution in it, by canonical name."""
        answer: dict[str, str] = json.loads(self.run_code(_LIST_INSTALLED))
        return {canonicalize_name(name): version for name, version in answer.items()}

    def run_code(self, code: str, *arguments: str) -> str:
        """Run code in its isolated interpreter and return what it prints."""
        done = subprocess.run(
            [self.python, "-I", "-c", code, *arguments],
            cwd=self.folder, env=clean_environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError("\n".join(done.stderr.rstrip().splitlines()[-12:]))
        return done.stdout


def make_venv(folder: Path, python: str, constraints: Iterable[str]) -> CleanVenv:
    """Make a virtual environment with nothing in it."""
    uv = find_uv()
    if uv is None:
        raise InstallError("uv is not installed; it comes with hatch, or: pip install uv")
    _run_uv([uv, "venv", "--quiet", "--python", python, str(folder)])
    return CleanVenv(folder, uv, tuple(constraints))


def _run_uv(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command)}\n{done.stderr}".rstrip())
    return done.stdout


_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


def find_uv() -> str | None:
    """The command that starts uv: on ``PATH``, where hatch says it is, or beside this Python."""
    beside = shutil.which("uv", path=str(Path(sys.executable).parent))
    return shutil.which("uv") or os.environ.get("HATCH_UV") or beside


def clean_environment() -> dict[str, str]:
    """The environment variables without those that would lead into another installation."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}
