from pathlib import Path

import pytest
from packaging.version import Version

from monorepo.git_tags import (
    GitError,
    changed_files,
    export_tree,
    last_tag,
    merge_base,
    parse_tag,
    release_tags,
)
from monorepo.tests.sample_repository import SampleRepository

PACKAGES = ("mcore-tensor", "mcore-tensor-extra", "mcore-tensor-v2")


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    return SampleRepository(tmp_path)


@pytest.mark.parametrize(
    ("text", "package", "version"),
    [
        ("mcore-tensor-v0.1.0", "mcore-tensor", "0.1.0"),
        ("refs/tags/mcore-tensor-extra-v1.2.3", "mcore-tensor-extra", "1.2.3"),
        ("mcore-tensor-v2-v0.1.0", "mcore-tensor-v2", "0.1.0"),
        ("mcore-tensor-v1.0.0rc1", "mcore-tensor", "1.0.0rc1"),
        ("v0.1.0", "", None),
        ("mcore-parallel-v0.1.0", "", None),
        ("mcore-tensor-vfirst", "", None),
        ("mcore-tensor-v1.0.0-rc1", "", None),
    ],
)
def test_the_longest_name_wins(text: str, package: str, version: str | None) -> None:
    if version is None:
        with pytest.raises(ValueError, match=text.rpartition("-v")[2]):
            parse_tag(text, PACKAGES)
        return
    tag = parse_tag(text, PACKAGES)
    assert (tag.package, str(tag.version)) == (package, version)
    assert tag.name == text.removeprefix("refs/tags/")


def test_the_highest_tag_of_a_package_is_found_by_version(repository: SampleRepository) -> None:
    repository.commit(*(f"mcore-tensor-v0.{minor}.0" for minor in (2, 9, 10)), "mcore-tensor-vx")
    repository.commit("mcore-tensor-v2-v5.0.0", "other-v1.0.0")
    tags = release_tags(repository.root, "mcore-tensor", PACKAGES)
    assert [str(tag.version) for tag in tags] == ["0.2.0", "0.9.0", "0.10.0"]

    def last(**limits: Version) -> str:
        tag = last_tag(repository.root, "mcore-tensor", PACKAGES, **limits)
        return "none" if tag is None else tag.name

    assert last() == "mcore-tensor-v0.10.0"
    assert last(up_to=Version("0.9.0")) == "mcore-tensor-v0.9.0"
    assert last(below=Version("0.9.0")) == "mcore-tensor-v0.2.0"
    assert last(below=Version("0.2.0")) == "none"


def test_changes_include_new_files_and_both_names_of_a_rename(
    repository: SampleRepository,
) -> None:
    repository.write({"a/one.py": "1\n", "a/gone.py": "text\n" * 20, "b/other.py": "1\n"})
    first = repository.commit()
    (repository.root / "a/gone.py").rename(repository.root / "a/came.py")
    repository.write({"a/one.py": "2\n", "b/other.py": "2\n"})
    expected = ["a/came.py", "a/gone.py", "a/one.py"]
    assert changed_files(repository.root, first, ["a"]) == expected
    repository.commit()
    assert changed_files(repository.root, first, ["a"]) == expected


def test_a_revision_is_written_out_without_touching_the_repository(
    repository: SampleRepository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    repository.write({"a/one.py": "old\n", "b/two.py": "old\n"})
    first = repository.commit()
    repository.write({"a/one.py": "new\n"})
    target = tmp_path_factory.mktemp("exported")
    export_tree(repository.root, first, target, "a")
    assert (target / "a/one.py").read_text() == "old\n"
    assert not (target / "b").exists()
    assert repository.read("a/one.py") == "new\n"


def test_errors_say_what_git_said(repository: SampleRepository) -> None:
    repository.commit()
    with pytest.raises(GitError, match="nowhere"):
        merge_base(repository.root, "nowhere")
    with pytest.raises(GitError, match="git archive"):
        export_tree(repository.root, "HEAD", repository.root / "x", "absent")
