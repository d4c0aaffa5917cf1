from pathlib import Path

import pytest

from monorepo.ranges import find_misfits
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path)
    repository.add_package("mcore-versioning", version="0.1.0")
    repository.add_package("mcore-tensor", needs=("mcore-versioning>=0.1,<0.2", "numpy>=1"))
    needs = ("mcore-versioning>=0.1,<0.2", "mcore-tensor>=0.1,<0.2")
    repository.add_package("mcore-parallel", needs=needs)
    return repository


def _said(repository: SampleRepository) -> list[str]:
    return list(find_misfits(load_workspace(repository.root)))


def test_a_minor_bump_of_a_sibling_lists_every_package_that_has_to_follow(
    repository: SampleRepository,
) -> None:
    assert _said(repository) == []
    repository.set_version("mcore-versioning", "0.2.0")
    assert _said(repository) == [
        f"{package} requires mcore-versioning>=0.1,<0.2, which leaves out mcore-versioning 0.2.0 "
        'of this repository; write "mcore-versioning>=0.1,<0.3", or "mcore-versioning>=0.2,<0.3" '
        "if it needs the new version"
        for package in ("mcore-tensor", "mcore-parallel")
    ]


@pytest.mark.parametrize(
    ("written", "version", "advice"),
    [
        ("mcore-versioning>=0.2,<0.3", "0.1.0", '"mcore-versioning>=0.1,<0.2"'),
        ("mcore-versioning==0.1.0", "1.2.3", '"mcore-versioning>=1.2.3,<2"'),
        ("mcore-versioning", "0.1.0", '"mcore-versioning>=0.1,<0.2"'),
        ("mcore-versioning>=0.1", "0.1.0", '"mcore-versioning>=0.1,<0.2"'),
        ("mcore-versioning>=1,<2", "2.0.0", '"mcore-versioning>=1,<3"'),
    ],
)
def test_the_advice_is_what_to_write(
    repository: SampleRepository, written: str, version: str, advice: str
) -> None:
    repository.set_version("mcore-versioning", version)
    repository.add_package("mcore-tensor", needs=(written,))
    repository.add_package("mcore-parallel")
    [line] = _said(repository)
    assert line.endswith(f"; write {advice}") or f"write {advice}, or" in line


def test_ranges_of_extras_count_and_pre_releases_are_taken(repository: SampleRepository) -> None:
    repository.set_version("mcore-versioning", "0.1.5rc1")
    assert _said(repository) == []
    table = "packages/mcore-parallel/pyproject.toml"
    text = repository.read(table)
    extra = "[project.optional-dependencies]\nall = [\"mcore-tensor>=0.3; python_version>'3'\"]\n"
    repository.write({table: f"{text}\n{extra}"})
    [line] = _said(repository)
    assert "mcore-parallel requires mcore-tensor>=0.3" in line
    assert 'write "mcore-tensor>=0.1,<0.2; python_version > "3"' in line
