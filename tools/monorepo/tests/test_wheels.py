"""Tests of building distributions the way they are shipped."""

import zipfile
from pathlib import Path

import pytest

from monorepo.isolation.wheels import BuildError, build_wheels
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import Distribution, load_workspace


@pytest.fixture
def package(tmp_path: Path) -> tuple[SampleRepository, Distribution]:
    """One package in a repository."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base", code="answer = 42\n")
    return made, load_workspace(made.root)["mcore-base"]


def test_wheel_comes_from_the_sdist(
    package: tuple[SampleRepository, Distribution], tmp_path: Path
) -> None:
    repository, base = package
    repository.write({"packages/mcore-base/src/mcore/base/left_out.py": "never = 1\n"})
    file = "packages/mcore-base/pyproject.toml"
    left_out = '[tool.hatch.build.targets.sdist]\nexclude = ["left_out.py"]'
    text = repository.read(file).replace("[tool.hatch.build.targets.sdist]", left_out)
    repository.write({file: text})
    before = repository.files()
    wheel = build_wheels([base], tmp_path / "wheels")["mcore-base"]
    assert repository.files() == before
    assert wheel == tmp_path / "wheels" / "mcore-base" / "mcore_base-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("mcore/base/__init__.py") == b"answer = 42\n"
    assert {"mcore/base/py.typed", "mcore_base-0.1.0.dist-info/licenses/LICENSE"} <= names
    assert "mcore/__init__.py" not in names
    assert "mcore/base/left_out.py" not in names


def test_output_of_a_failing_builder_is_kept(
    package: tuple[SampleRepository, Distribution], tmp_path: Path
) -> None:
    _, base = package
    base.version_file.unlink()
    with pytest.raises(BuildError, match=r"(?s)no sdist of .*_version\.py"):
        build_wheels([base], tmp_path / "wheels")
