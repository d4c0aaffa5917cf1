"""Wheels built as they are shipped, and environments made by uv that see no repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from monorepo.workspace import Distribution

_LIST_INSTALLED = """
import importlib.metadata, json
every = importlib.metadata.distributions()
print(json.dumps({each.metadata["Name"]: each.version for each in every}))
"""
_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


class IsolationError(RuntimeError):
    """A package cannot be built, installed or used alone. The text has the tool's output."""


def build_wheels(distributions: Iterable[Distribution], folder: Path) -> dict[str, Path]:
    """Build each wheel from the unpacked sdist, as an installer without the wheel would."""
    wheels = {}
    for distribution in distributions:
        with tempfile.TemporaryDirectory(prefix="sdist-") as scratch:
            sdist = build(distribution.folder, "sdist", Path(scratch) / "packed")
            with tarfile.open(sdist) as archive:
                archive.extractall(Path(scratch) / "unpacked", filter="data")
            (tree,) = (Path(scratch) / "unpacked").iterdir()
            wheels[distribution.name] = build(tree, "wheel", folder / distribution.name)
    return wheels


def build(source: Path, target: str, folder: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` of a source tree into an empty folder, without network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IsolationError(f"no {target} of {source}:\n{done.stdout}{done.stderr}")
    (built,) = folder.iterdir()
    return built


@dataclass(frozen=True)
class CleanVenv:
    """A virtual environment.

    Attributes:
        folder: Its path.
        uv: The command that starts uv.
        constraints: Lines of a constraints file for every installation.
        options: Further options for every installation, such as the address of an index.
    """

    folder: Path
    uv: str
    constraints: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def install(self, *requirements: str) -> None:
        """Install requirements and their dependencies at the newest versions that fit."""
        constraints = self._write("constraints.txt", self.constraints)
        target = ["--python", str(self.python), "--constraints", constraints]
        _run([self.uv, "pip", "install", "--quiet", *target, *self.options, *requirements])

    def install_lowest(self, wheel: str, requirements: Sequence[str]) -> None:
        """Install a wheel, the lowest version of each requirement, and the newest of the rest.

        The lowest versions are pinned. With ``--resolution lowest-direct`` alone, uv would go above
        a floor if that lets it install a newer version of another library.
        """
        options = ["--no-deps", "--no-header", "--no-annotate", "--no-strip-extras", "--quiet"]
        wanted = self._write("wanted.txt", requirements)
        target = ["--python", str(self.python), "--resolution", "lowest", wanted]
        lowest = [
            Requirement(line)
            for line in _run([self.uv, "pip", "compile", *options, *target]).splitlines()
        ]
        pins = [
            f"{canonicalize_name(one.name)}{one.specifier}"
            for one in lowest
            if one.marker is None or one.marker.evaluate()
        ]
        self.install(wheel, *requirements, *pins)

    def installed(self) -> dict[str, str]:
        """The version of every distribution in it, by canonical name."""
        answer: dict[str, str] = json.loads(self.run_code(_LIST_INSTALLED))
        return {canonicalize_name(name): version for name, version in answer.items()}

    def run_code(self, code: str, *arguments: str) -> str:
        """Run code in its isolated interpreter and return the output."""
        done = subprocess.run(
            [self.python, "-I", "-c", code, *arguments],
            cwd=self.folder, env=clean_environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise IsolationError("\n".join(done.stderr.rstrip().splitlines()[-12:]))
        return done.stdout

    def run_tests(self, folder: Path, *arguments: str) -> int:
        """Run pytest in a folder outside the repository and return its status."""
        command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=folder, env=clean_environment(), check=False)
        return done.returncode

    def _write(self, name: str, lines: Iterable[str]) -> str:
        file = self.folder / name
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(file)


def make_venv(folder: Path, python: str, constraints: Iterable[str]) -> CleanVenv:
    """Make an empty virtual environment."""
    uv = find_uv()
    if uv is None:
        raise IsolationError("uv is not installed; it comes with hatch, or: pip install uv")
    _run([uv, "venv", "--quiet", "--python", python, str(folder)])
    return CleanVenv(folder, uv, tuple(constraints))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise IsolationError(f"{' '.join(command)}\n{done.stderr}".rstrip())
    return done.stdout


def find_uv() -> str | None:
    """The command that starts uv: on ``PATH``, where hatch keeps it, or next to this Python."""
    folder = str(Path(sys.executable).parent)
    return shutil.which("uv") or os.environ.get("HATCH_UV") or shutil.which("uv", path=folder)


def clean_environment() -> dict[str, str]:
    """The environment variables without those that would lead into another installation."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}
