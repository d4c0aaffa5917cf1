"""Building distributions the way they are shipped."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from monorepo.workspace import Distribution


class BuildError(RuntimeError):
    """A distribution could not be built; the text has the builder's output."""


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
        raise BuildError(f"no {target} of {source}:\n{done.stdout}{done.stderr}")
    (built,) = folder.iterdir()
    return built
