from pathlib import Path

import pytest
from packaging.version import Version

from monorepo.git_tags import last_tag, parse_tag, release_tags
from monorepo.tests.sample_repository import SampleRepository

PACKAGES = ("mcore-tensor", "mcore-tensor-extra")


@pytest.mark.parametrize(
    ("text", "package", "version"),
    [
        ("mcore-tensor-v0.1.0", "mcore-tensor", "0.1.0"),
        ("refs/tags/mcore-tensor-extra-v1.2.3", "mcore-tensor-extra", "1.2.3"),
        ("mcore-tensor-v1.0.0rc1", "mcore-tensor", "1.0.0rc1"),
        ("v0.1.0", "", None),
        ("mcore-parallel-v0.1.0", "", None),
        ("mcore-tensor-vfirst", "", None),
        ("mcore-tensor-v1.0.0-rc1", "", None),
    ],
)
def test_a_tag_is_a_package_and_a_version(text: str, package: str, version: str | None) -> None:
    if version is None:
        with pytest.raises(ValueError, match=text.rpartition("-v")[2]):
            parse_tag(text, PACKAGES)
        return
    tag = parse_tag(text, PACKAGES)
    assert (tag.package, str(tag.version)) == (package, version)
    assert tag.name == text.removeprefix("refs/tags/")


def test_the_highest_tag_of_a_package_is_found_by_version(tmp_path: Path) -> None:
    repository = SampleRepository(tmp_path)
    repository.commit(*(f"mcore-tensor-v0.{minor}.0" for minor in (2, 9, 10)), "mcore-tensor-vx")
    repository.commit("mcore-tensor-extra-v5.0.0", "other-v1.0.0")
    tags = release_tags(repository.root, "mcore-tensor", PACKAGES)
    assert [str(tag.version) for tag in tags] == ["0.2.0", "0.9.0", "0.10.0"]

    def last(**limits: Version) -> str:
        tag = last_tag(repository.root, "mcore-tensor", PACKAGES, **limits)
        return "none" if tag is None else tag.name

    assert last() == "mcore-tensor-v0.10.0"
    assert last(up_to=Version("0.9.0")) == "mcore-tensor-v0.9.0"
    assert last(below=Version("0.9.0")) == "mcore-tensor-v0.2.0"
    assert last(below=Version("0.2.0")) == "none"
