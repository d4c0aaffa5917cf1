"""Faults of archives that an index, an installer or a user would find."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from monorepo.workspace import Distribution


def archive_problems(package: Distribution, folder: Path) -> Iterator[str]:
    """Faults of the sdist and the wheel of a package in a folder, a line each."""
    stem = f"{package.name.replace('-', '_')}-"
    wheel = folder / f"{stem}{package.version}-py3-none-any.whl"
    sdist = folder / f"{stem}{package.version}.tar.gz"
    found = sorted(folder.glob(f"{stem}*"))
    if found != [wheel, sdist]:
        names = [file.name for file in found]
        yield f"{folder} has {names}, and has to have {wheel.name} and {sdist.name}"
        return
    yield from run_tool("twine", "check", "--strict", wheel, sdist)
    yield from run_tool("check_wheel_contents", "--no-config", "--src-dir", package.source, wheel)
    yield from _check_wheel(package, wheel)


def run_tool(tool: str, *arguments: object) -> Iterator[str]:
    """Run a Python tool. Yields its output if it fails."""
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{tool}: {' '.join((done.stdout + done.stderr).split())}"


def _check_wheel(package: Distribution, file: Path) -> Iterator[str]:
    """Yield missing files of a wheel, and files of other packages."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    info = f"{file.name.removesuffix('-py3-none-any.whl')}.dist-info"
    folder = f"{package.module.replace('.', '/')}/"
    for wanted in (f"{folder}py.typed", f"{info}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{file.name} lacks {wanted}"
    for other in names:
        if not other.startswith((folder, f"{info}/")):
            yield f"{file.name} has {other}, which is not part of {package.module}"
