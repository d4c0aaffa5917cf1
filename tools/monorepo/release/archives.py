"""Archives: what an index, an installer or a user would find wrong with them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.metadata import ExceptionGroup, InvalidMetadata, Metadata
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

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
    stem = package.name.replace("-", "_")
    wheels = sorted(folder.glob(f"{stem}-*.whl"))
    sdists = sorted(folder.glob(f"{stem}-*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        yield (
            f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists of {package.name}, "
            "not one of each"
        )
        return
    [wheel], [sdist] = wheels, sdists
    yield from _said("twine", "check", "--strict", str(wheel), str(sdist))
    source = ["--no-config", "--src-dir", str(package.source)]
    yield from _said("check_wheel_contents", *source, str(wheel))
    yield from _wheel_problems(package, wheel)
    yield from _sdist_problems(package, sdist)


def _said(tool: str, *arguments: str) -> Iterator[str]:
    """What a tool prints when it refuses."""
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{tool}: {' '.join((done.stdout + done.stderr).split())}"


def _wheel_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        stated = parse_wheel_filename(file.name)[:2]
    except InvalidWheelFilename as error:
        yield str(error)
        return
    info = f"{file.name.rsplit('-', 3)[0]}.dist-info"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        content = archive.read(f"{info}/METADATA") if f"{info}/METADATA" in names else None
    yield from _metadata_problems(package, file, stated, content)
    module = package.module.replace(".", "/")
    for wanted in (f"{module}/py.typed", f"{info}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{file.name} lacks {wanted}"
    for other in names:
        if not other.startswith((f"{module}/", f"{info}/")):
            yield f"{file.name} has {other}, which is not part of {package.module}"


def _sdist_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        stated = parse_sdist_filename(file.name)
    except InvalidSdistFilename as error:
        yield str(error)
        return
    info = f"{file.name.removesuffix('.tar.gz')}/PKG-INFO"
    with tarfile.open(file) as archive:
        member = archive.extractfile(info) if info in archive.getnames() else None
        content = None if member is None else member.read()
    yield from _metadata_problems(package, file, stated, content)


def _metadata_problems(
    package: Distribution, file: Path, stated: Sequence[object], content: bytes | None
) -> Iterator[str]:
    """Compare an archive's name and metadata with the package's own files."""
    if tuple(stated) != (package.name, package.version):
        yield f"{file.name} is not {package.name} {package.version}"
    try:
        metadata = Metadata.from_email(content or b"", validate=True)
    except (ExceptionGroup, InvalidMetadata) as error:
        yield f"{file.name} has metadata that an index refuses: {error}"
        return
    if (metadata.name, metadata.version) != (package.name, package.version):
        yield f"{file.name} says that it is {metadata.name} {metadata.version}"
    if Version(metadata.metadata_version) > NEWEST_METADATA:
        yield (
            f"{file.name} has metadata {metadata.metadata_version}, newer than the "
            f"{NEWEST_METADATA} that publishing tools know: set core-metadata-version"
        )
    required = metadata.requires_dist or []
    plain = {one for one in required if one.marker is None or "extra" not in str(one.marker)}
    if plain != set(package.dependencies):
        declared = sorted(map(str, package.dependencies))
        yield f"{file.name} requires {sorted(map(str, plain))}, pyproject.toml {declared}"
