"""Built wheels and sdists, held against what the package says of itself."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

from packaging.metadata import ExceptionGroup, InvalidMetadata, Metadata
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)

from monorepo.wheels import build
from monorepo.workspace import Distribution


def build_archives(package: Distribution, folder: Path) -> None:
    """Build the sdist and the wheel of a package into a folder.

    Raises:
        BuildError: The build failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for target in ("sdist", "wheel"):
        built = build(package.folder, target, folder.resolve() / target)
        built.rename(folder / built.name)


def archive_problems(package: Distribution, folder: Path) -> Iterator[str]:
    """What is wrong with the archives in a folder, in a line each."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        yield f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists, not one of each"
    for file in wheels:
        yield from _wheel_problems(package, file)
    for file in sdists:
        yield from _sdist_problems(package, file)


def _wheel_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        name, version, *_ = parse_wheel_filename(file.name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    if (name, version) != (package.name, package.version):
        yield f"{file.name} is not {package.name} {package.version}"
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        info = f"{file.name.rsplit('-', 3)[0]}.dist-info"
        if f"{info}/METADATA" not in names:
            yield f"{file.name} lacks {info}/METADATA"
            return
        yield from _metadata_problems(package, file, archive.read(f"{info}/METADATA"))
    module = package.module.replace(".", "/")
    for wanted in (f"{module}/__init__.py", f"{module}/py.typed", f"{info}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{file.name} lacks {wanted}"
    for other in names:
        if not other.startswith((f"{module}/", f"{info}/")):
            yield f"{file.name} has {other}, which is not part of {package.module}"


def _sdist_problems(package: Distribution, file: Path) -> Iterator[str]:
    try:
        name, version = parse_sdist_filename(file.name)
    except InvalidSdistFilename as error:
        yield str(error)
        return
    if (name, version) != (package.name, package.version):
        yield f"{file.name} is not {package.name} {package.version}"
    with tarfile.open(file) as archive:
        info = f"{file.name.removesuffix('.tar.gz')}/PKG-INFO"
        member = archive.extractfile(info) if info in archive.getnames() else None
        content = None if member is None else member.read()
    if content is None:
        yield f"{file.name} lacks {info}"
        return
    yield from _metadata_problems(package, file, content)


def _metadata_problems(package: Distribution, file: Path, content: bytes) -> Iterator[str]:
    """Read the metadata as an index does, and compare it with the package's own files."""
    try:
        metadata = Metadata.from_email(content, validate=True)
    except (ExceptionGroup, InvalidMetadata) as error:
        yield f"{file.name} has metadata that an index refuses: {error}"
        return
    stated = (metadata.name, metadata.version)
    if stated != (package.name, package.version):
        yield f"{file.name} says that it is {stated[0]} {stated[1]}"
    declared = {str(one) for one in package.dependencies}
    plain = {
        str(one)
        for one in metadata.requires_dist or ()
        if one.marker is None or "extra" not in str(one.marker)
    }
    if plain != declared:
        yield f"{file.name} requires {sorted(plain)}, pyproject.toml {sorted(declared)}"
    if not BytesParser().parsebytes(content).get_payload():
        yield f"{file.name} carries no README"
