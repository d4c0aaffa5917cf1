import zipfile
from pathlib import Path

import pytest

from monorepo.isolation.floors import floor_tags, floor_wheels
from monorepo.release.__main__ import main
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    """A sibling with three releases, the last of which has a new function."""
    repository = SampleRepository(tmp_path / "repository")
    repository.add_package("mcore-versioning", code="def old(): ...\n")
    repository.add_package("mcore-tensor", needs=("mcore-versioning>=0.2,<0.4",))
    repository.commit("mcore-versioning-v0.1.0")
    for version in ("0.2.0", "0.3.0"):
        repository.set_version("mcore-versioning", version)
        if version == "0.3.0":
            repository.set_code("mcore-versioning", "def old(): ...\ndef new(): ...\n")
        repository.commit(f"mcore-versioning-v{version}")
    return repository


def _source(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(file).decode()


def test_siblings_are_built_as_they_were_and_the_package_as_it_is(
    repository: SampleRepository, tmp_path: Path
) -> None:
    repository.set_code("mcore-tensor", "from mcore.versioning import new\n")
    workspace = load_workspace(repository.root)
    tags = floor_tags(workspace, "mcore-tensor")
    assert [tag.name for tag in tags.values()] == ["mcore-versioning-v0.2.0"]
    wheels = floor_wheels(workspace, "mcore-tensor", tags, tmp_path)
    assert {name: wheel.name for name, wheel in wheels.items()} == {
        "mcore-tensor": "mcore_tensor-0.1.0-py3-none-any.whl",
        "mcore-versioning": "mcore_versioning-0.2.0-py3-none-any.whl",
    }
    sibling = _source(wheels["mcore-versioning"], "mcore/versioning/__init__.py")
    assert "old" in sibling
    assert "new" not in sibling
    assert "new" in _source(wheels["mcore-tensor"], "mcore/tensor/__init__.py")


def test_without_tags_it_says_so_and_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = SampleRepository(tmp_path)
    repository.add_package("mcore-versioning")
    repository.add_package("mcore-tensor", needs=("mcore-versioning>=0.1,<0.2",))
    repository.commit()
    arguments = ["--root", str(tmp_path), "floors", "mcore-tensor", "--torch", "2.13.0"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no release of mcore-versioning fits mcore-versioning>=0.1,<0.2: taken as it is here",
        "mcore-tensor has no sibling with a release tag: nothing to go back to",
    ]
