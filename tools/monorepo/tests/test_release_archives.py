"""What is refused in the archives of a release."""

import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from monorepo.release.archives import archive_problems, build_archives
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, Distribution, load_workspace

PYPROJECT = "packages/mcore-tensor/pyproject.toml"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path / "repository")
    needs = ("packaging>=23.2", "typing_extensions>=4.12")
    repository.add_package("mcore-tensor", needs=needs)
    return repository


def _problems(repository: SampleRepository, folder: Path) -> list[str]:
    package = load_workspace(repository.root)["mcore-tensor"]
    build_archives(package, folder)
    return list(archive_problems(package, folder))


def test_the_five_packages_of_this_repository_may_be_published(tmp_path: Path) -> None:
    for package in load_workspace(REPOSITORY).distributions.values():
        build_archives(package, tmp_path)
        assert list(archive_problems(package, tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 10


def without_readme(repository: SampleRepository) -> None:
    text = repository.read(PYPROJECT)
    repository.write({PYPROJECT: text.replace('readme = "README.md"\n', "")})


def newest_metadata(repository: SampleRepository) -> None:
    text = repository.read(PYPROJECT)
    repository.write({PYPROJECT: text.replace('core-metadata-version = "2.4"', "")})


def file_of_the_namespace(repository: SampleRepository) -> None:
    repository.write({"packages/mcore-tensor/src/mcore/__init__.py": ""})


def without_type_marker(repository: SampleRepository) -> None:
    (repository.root / "packages/mcore-tensor/src/mcore/tensor/py.typed").unlink()


def left_out_of_the_wheel(repository: SampleRepository) -> None:
    text = repository.read(PYPROJECT)
    wheel = "[tool.hatch.build.targets.wheel]"
    repository.write(
        {
            PYPROJECT: text.replace(wheel, f'{wheel}\nexclude = ["lost.py"]'),
            "packages/mcore-tensor/src/mcore/tensor/lost.py": "x = 1\n",
        }
    )


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (without_readme, "long_description"),
        (newest_metadata, "newer than the 2.4 that publishing tools know"),
        (file_of_the_namespace, "has mcore/__init__.py, which is not part of mcore.tensor"),
        (without_type_marker, "lacks mcore/tensor/py.typed"),
        (left_out_of_the_wheel, "W101"),
    ],
)
def test_what_users_would_miss_is_refused(
    repository: SampleRepository,
    tmp_path: Path,
    plant: Callable[[SampleRepository], None],
    said: str,
) -> None:
    plant(repository)
    assert said in "\n".join(_problems(repository, tmp_path / "dist"))


def test_names_of_files_and_metadata_have_to_agree_with_the_sources(
    repository: SampleRepository, tmp_path: Path
) -> None:
    folder = tmp_path / "dist"
    assert _problems(repository, folder) == []
    repository.set_version("mcore-tensor", "0.1.1")
    text = repository.read(PYPROJECT)
    repository.write({PYPROJECT: text.replace("typing_extensions>=4.12", "numpy>=2")})
    package = load_workspace(repository.root)["mcore-tensor"]
    for file in ("mcore_tensor-0.1.0-py3-none-any.whl", "mcore_tensor-0.1.0.tar.gz"):
        found = [line for line in archive_problems(package, folder) if line.startswith(file)]
        assert found == [
            f"{file} is not mcore-tensor 0.1.1",
            f"{file} says that it is mcore-tensor 0.1.0",
            f"{file} requires ['packaging>=23.2', 'typing-extensions>=4.12'], "
            "pyproject.toml ['numpy>=2', 'packaging>=23.2']",
        ]
    shutil.copy(folder / file, folder / "mcore_tensor-0.1.1.tar.gz")
    [line] = archive_problems(package, folder)
    assert line.endswith("has 1 wheels and 2 sdists of mcore-tensor, not one of each")


def test_metadata_that_an_index_refuses_is_found_in_both_archives(
    repository: SampleRepository, tmp_path: Path
) -> None:
    folder = tmp_path / "dist"
    assert _problems(repository, folder) == []
    package = load_workspace(repository.root)["mcore-tensor"]
    _break_metadata(folder, package)
    refused = [line for line in archive_problems(package, folder) if "an index refuses" in line]
    assert [line.partition(" ")[0] for line in refused] == [
        "mcore_tensor-0.1.0-py3-none-any.whl",
        "mcore_tensor-0.1.0.tar.gz",
    ]


def _break_metadata(folder: Path, package: Distribution) -> None:
    """Write a classifier field that no index knows into a wheel and an sdist."""
    stem = f"mcore_tensor-{package.version}"
    wheel, sdist = folder / f"{stem}-py3-none-any.whl", folder / f"{stem}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, _broken(content) if name.endswith("METADATA") else content)
    tree = folder / "unpacked"
    with tarfile.open(sdist) as packed:
        packed.extractall(tree, filter="data")
    info = tree / stem / "PKG-INFO"
    info.write_bytes(_broken(info.read_bytes()))
    with tarfile.open(sdist, "w:gz") as packed:
        packed.add(tree / stem, stem)


def _broken(content: bytes) -> bytes:
    return content.replace(b"Version: 0.1.0\n", b"Version: not a version\n", 1)
