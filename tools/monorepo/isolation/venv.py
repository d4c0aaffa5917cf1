"""Wheels built as they are shipped, and environments made by uv that see no repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from monorepo.workspace import Distribution

_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")


class IsolationError(RuntimeError):
    """A package cannot be built, installed or used alone. The text has the tool's output."""


def build(source: Path, folder: Path, *options: str) -> None:
    """Build the sdist of a source tree and then a wheel of the sdist, without network.

    ``--sdist`` or ``--wheel`` builds only one of them, of the source tree.
    """
    backend = ["--no-build-isolation", "--python", sys.executable]
    run_uv("build", "--quiet", *backend, "--out-dir", str(folder), *options, str(source))


def build_wheels(distributions: Iterable[Distribution], folder: Path) -> dict[str, Path]:
    """Build each wheel from its sdist, as an installer without the wheel would."""
    wheels = {}
    for distribution in distributions:
        build(distribution.folder, folder / distribution.name)
        (wheels[distribution.name],) = (folder / distribution.name).glob("*.whl")
    return wheels


@dataclass(frozen=True)
class CleanVenv:
    """A virtual environment.

    Attributes:
        folder: Its path.
        options: Options of uv for every installation, such as files of constraints or an index.
    """

    folder: Path
    options: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def install(self, *requirements: str) -> None:
        """Install requirements and their dependencies at the newest versions that fit."""
        target = ["--quiet", "--python", str(self.python)]
        run_uv("pip", "install", *target, *self.options, *requirements)

    def pin_lowest(self, requirements: Iterable[str]) -> CleanVenv:
        """The same environment, with each requirement pinned to the lowest version allowed.

        With ``--resolution lowest-direct`` alone, uv would go above a floor if that lets it install
        a newer version of another library.
        """
        wanted = _write(self.folder / "wanted.txt", requirements)
        lowest = str(self.folder / "lowest.txt")
        target = ["--quiet", "--python", str(self.python), "--output-file", lowest]
        run_uv("pip", "compile", "--no-deps", "--resolution", "lowest", *target, wanted)
        return replace(self, options=(*self.options, "--constraints", lowest))

    def installed(self) -> dict[str, str]:
        """The version of every distribution in it, by canonical name."""
        listed = run_uv("pip", "list", "--quiet", "--format=json", "--python", str(self.python))
        return {one["name"]: one["version"] for one in json.loads(listed)}

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


def make_venv(folder: Path, python: str, constraints: Iterable[str]) -> CleanVenv:
    """Make an empty virtual environment, whose installations obey the constraints."""
    run_uv("venv", "--quiet", "--python", python, str(folder))
    return CleanVenv(folder, ("--constraints", _write(folder / "constraints.txt", constraints)))


def _write(file: Path, lines: Iterable[str]) -> str:
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def run_uv(*arguments: str) -> str:
    """Run uv of ``PATH``, of hatch or next to this Python, and return the output."""
    folder = str(Path(sys.executable).parent)
    uv = shutil.which("uv") or os.environ.get("HATCH_UV") or shutil.which("uv", path=folder)
    if uv is None:
        raise IsolationError("uv is not installed; it comes with hatch, or: pip install uv")
    done = subprocess.run(
        [uv, *arguments], env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise IsolationError(f"uv {' '.join(arguments)}\n{done.stderr}".rstrip())
    return done.stdout


def clean_environment() -> dict[str, str]:
    """The environment variables without those that would lead into another installation."""
    return {name: value for name, value in os.environ.items() if name not in _UNWANTED}
