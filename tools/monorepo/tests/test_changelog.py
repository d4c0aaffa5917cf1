from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from monorepo.changelog import ChangelogError, find_section, fold, problems
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

DAY = date(2026, 2, 3)
FRAGMENTS = "packages/mcore-tensor/changelog.d"
WANTED = "changelog.d/SLUG.KIND.md with KIND of added, changed, deprecated, removed, fixed"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path)
    repository.add_package("mcore-tensor", code="x = 1\n")
    repository.add_package("mcore-parallel", code="x = 1\n")
    repository.commit()
    repository.git("checkout", "-b", "change")
    return repository


def _problems(repository: SampleRepository, base: str | None = None) -> list[str]:
    return list(problems(load_workspace(repository.root), base))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("more.improved.md", f"more.improved.md; name it {WANTED}"),
        ("added.md", f"added.md; name it {WANTED}"),
        ("a b.added.md", WANTED),
        ("a.fixed.md", "a.fixed.md is no file or empty; describe the change"),
        ("folder/a.fixed.md", "folder is no file or empty; describe the change"),
    ],
)
def test_a_fragment_that_cannot_be_folded_fails(
    repository: SampleRepository, name: str, said: str
) -> None:
    repository.write({f"{FRAGMENTS}/{name}": " \n" if name == "a.fixed.md" else "text\n"})
    [line] = _problems(repository)
    assert line.startswith("mcore-tensor: ")
    assert line.endswith(said)


def test_changed_sources_need_a_new_fragment_of_their_package(repository: SampleRepository) -> None:
    repository.write({f"{FRAGMENTS}/old.added.md": "Before.\n"})
    base = repository.commit()
    repository.set_code("mcore-tensor", "x = 2\n")
    repository.write({"packages/mcore-parallel/tests/test_x.py": "\n"})
    repository.write({"packages/mcore-parallel/changelog.d/other.fixed.md": "Not its own.\n"})
    (repository.root / FRAGMENTS / "old.added.md").unlink()
    repository.commit()
    [line] = _problems(repository, base)
    assert line.startswith("mcore-tensor: src changed and no fragment describes it: add ")
    assert line.endswith(f"packages/mcore-tensor/{WANTED}")
    repository.write({f"{FRAGMENTS}/faster.changed.md": "Faster.\n"})
    assert _problems(repository, base) == []


def test_a_changelog_is_edited_by_releases_only(repository: SampleRepository) -> None:
    file = "packages/mcore-tensor/CHANGELOG.md"
    text = repository.read(file)
    repository.write({file: f"{text}- More.\n"})
    [line] = _problems(repository, "main")
    assert line.startswith(
        f"mcore-tensor: CHANGELOG.md is written by releases: restore it and add {FRAGMENTS}/"
    )
    assert _problems(repository) == []
    repository.set_version("mcore-tensor", "0.2.0")
    heading = "## 0.2.0 (2026-02-03)"
    repository.write({file: text.replace("## 0.1.0", f"{heading}\n\n- More.\n\n## 0.1.0")})
    assert _problems(repository, "main") == []


def test_a_version_needs_a_section_or_fragments(repository: SampleRepository) -> None:
    repository.set_version("mcore-tensor", "0.2.0")
    [line] = _problems(repository)
    assert line.startswith("mcore-tensor: nothing describes 0.2.0 of _version.py: add changelog.d/")
    repository.write({f"{FRAGMENTS}/new.added.md": "New.\n"})
    assert _problems(repository) == []


def test_folding(repository: SampleRepository) -> None:
    repository.write(
        {
            f"{FRAGMENTS}/b.added.md": "Second thing,\non two lines.\n",
            f"{FRAGMENTS}/a.added.md": "- First thing.\n- And this.\n",
            f"{FRAGMENTS}/c.removed.md": "Old thing.\n",
            f"{FRAGMENTS}/.gitkeep": "",
        }
    )
    package = load_workspace(repository.root)["mcore-tensor"]
    after = fold(package, Version("0.2.0"), DAY)
    assert after == (
        "# Changelog of mcore-tensor\n\n"
        "## 0.2.0 (2026-02-03)\n\n"
        "### Added\n\n- First thing.\n- And this.\n- Second thing,\n  on two lines.\n\n"
        "### Removed\n\n- Old thing.\n\n"
        "## 0.1.0 (2026-01-01)\n\n### Added\n\n- All.\n"
    )
    section = find_section(after, Version("0.2.0"))
    assert section is not None
    assert section.startswith("### Added")
    assert section.endswith("- Old thing.")
    with pytest.raises(ChangelogError, match=r"a section for 0\.1\.0 already"):
        fold(package, Version("0.1.0"), DAY)
