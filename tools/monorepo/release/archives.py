"""Archives: what an index, an installer or a user would find wrong with them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from twine.exceptions import InvalidDistribution
from twine.package import PackageFile

from monorepo.isolation.wheels import build
from monorepo.workspace import Distribution

# What the packages ask hatchling for. Publishing tools lag behind the newest.
NEWEST_METADATA = Version("2.4")


def build_archives(package: Distribution, folder: Path) -> None:
    """Build the sdist and the wheel of a package into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for target in ("sdist", "wheel"):
        built = build(package.folder, target, folder.resolve() / f"{package.name}-{target}")
        built.rename(folder / built.name)
        built.parent.rmdir()


def archive_problems(package: Distribution, folder: Path) -> Iterator[str]:
    """What is wrong with the sdist and the wheel of a package in a folder, in a line each."""
    stem = f"{package.name.replace('-', '_')}-"
    wheel = folder / f"{stem}{package.version}-py3-none-any.whl"
    sdist = folder / f"{stem}{package.version}.tar.gz"
    there = sorted(folder.glob(f"{stem}*"))
    if there != [wheel, sdist]:
        names = [file.name for file in there]
        yield f"{folder} has {names}, and has to have {wheel.name} and {sdist.name}"
        return
    yield from complaints("twine", "check", "--strict", wheel, sdist)
    yield from complaints("check_wheel_contents", "--no-config", "--src-dir", package.source, wheel)
    yield from _wheel_problems(package, wheel)
    for file in there:
        yield from _metadata_problems(package, file)


def complaints(tool: str, *arguments: object) -> Iterator[str]:
    """What a Python tool prints when it refuses."""
    command = [sys.executable, "-m", tool, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{tool}: {' '.join((done.stdout + done.stderr).split())}"


def _wheel_problems(package: Distribution, file: Path) -> Iterator[str]:
    """What a wheel lacks, and what belongs to another package."""
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


def _metadata_problems(package: Distribution, file: Path) -> Iterator[str]:
    """Compare an archive's metadata with the package's own files."""
    try:
        stated = PackageFile.from_filename(str(file), None).metadata
    except InvalidDistribution as error:
        yield f"{file.name} has metadata that an index refuses: {error}"
        return
    if (canonicalize_name(stated["name"]), stated["version"]) != (
        package.name,
        str(package.version),
    ):
        yield f"{file.name} says that it is {stated['name']} {stated['version']}"
    if Version(stated["metadata_version"]) > NEWEST_METADATA:
        yield (
            f"{file.name} has metadata {stated['metadata_version']}, newer than the "
            f"{NEWEST_METADATA} that publishing tools know: set core-metadata-version"
        )
    required = map(Requirement, stated.get("requires_dist", ()))
    plain = {one for one in required if "extra" not in str(one.marker)}
    if plain != set(package.dependencies):
        declared = sorted(map(str, package.dependencies))
        yield f"{file.name} requires {sorted(map(str, plain))}, pyproject.toml {declared}"
