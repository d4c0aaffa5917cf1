"""Faults in the archives of a release."""

from pathlib import Path

import pytest

from monorepo.isolation.venv import build
from monorepo.release.__main__ import main
from monorepo.release.archives import archive_problems
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

PYPROJECT = "packages/mcore-tensor/pyproject.toml"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path / "repository")
    needs = ("packaging>=23.2", "typing_extensions>=4.12")
    repository.add_package("mcore-tensor", needs=needs)
    return repository


def _problems(repository: SampleRepository, folder: Path) -> list[str]:
    package = load_workspace(repository.root)["mcore-tensor"]
    build(package.folder, folder)
    return list(archive_problems(package, folder))


def test_missing_and_foreign_files_are_refused(
    repository: SampleRepository, tmp_path: Path
) -> None:
    for old, new in (
        ('readme = "README.md"\n', ""),
        (
            "[tool.hatch.build.targets.wheel]",
            '[tool.hatch.build.targets.wheel]\nexclude = ["l.py"]',
        ),
    ):
        repository.replace(PYPROJECT, old, new)
    source = "packages/mcore-tensor/src/mcore"
    repository.write({f"{source}/__init__.py": "", f"{source}/tensor/l.py": "x=1"})
    repository.write({f"{source}/more/__init__.py": ""})
    (repository.root / source / "tensor/py.typed").unlink()
    found = "\n".join(_problems(repository, tmp_path / "dist"))
    for expected in (
        "long_description",
        "has mcore/__init__.py, which is not part of mcore.tensor",
        "lacks mcore/tensor/py.typed",
        "has mcore/more/__init__.py",
        "W101",
    ):
        assert expected in found


def test_names_of_files_have_to_agree_with_the_sources(
    repository: SampleRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dist"
    build(load_workspace(repository.root)["mcore-tensor"].folder, folder)
    repository.commit()
    command = ["--root", str(repository.root), "verify", "mcore-tensor", "--archives"]
    assert main([*command, str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "there are no release tags: nothing earlier to compare with",
        "mcore-tensor 0.1.0 is in order",
    ]
    repository.set_version("mcore-tensor", "0.1.1")
    package = load_workspace(repository.root)["mcore-tensor"]
    files = ("mcore_tensor-0.1.0-py3-none-any.whl", "mcore_tensor-0.1.0.tar.gz")
    [line] = archive_problems(package, folder)
    assert f"has {[*files]}, and has to have mcore_tensor-0.1.1-py3-none-any.whl and" in line
