from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from monorepo.changelog import ChangelogError, fold, main, problems, section
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace

DAY = date(2026, 2, 3)
FRAGMENTS = "packages/mcore-tensor/changelog.d"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path)
    repository.add_package("mcore-tensor", code="x = 1\n")
    repository.add_package("mcore-parallel", code="x = 1\n")
    repository.commit()
    repository.branch("change")
    return repository


def _problems(repository: SampleRepository, base: str | None = None) -> list[str]:
    return problems(load_workspace(repository.root), base)


def test_the_changelogs_of_this_repository_are_in_order() -> None:
    assert problems(load_workspace(REPOSITORY), None) == []


@pytest.mark.parametrize("name", ["more.improved.md", "added.md", "Odd.added.md", "a b.added.md"])
def test_a_fragment_of_an_unknown_type_fails(repository: SampleRepository, name: str) -> None:
    repository.write({f"{FRAGMENTS}/{name}": "text\n"})
    [line] = _problems(repository)
    assert line.startswith("mcore-tensor: ")
    assert name.split(".")[0] in line
    assert line.endswith(
        "changelog.d/SLUG.KIND.md with KIND of added, changed, deprecated, removed, fixed"
    )


def test_an_empty_fragment_fails(repository: SampleRepository) -> None:
    repository.write({f"{FRAGMENTS}/a.fixed.md": "\n"})
    assert "a.fixed.md is empty" in _problems(repository)[0]


def test_changed_sources_need_a_fragment_of_their_package(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.set_code("mcore-tensor", "x = 2\n")
    repository.write({"packages/mcore-parallel/tests/test_x.py": "\n"})
    repository.write({"packages/mcore-parallel/changelog.d/other.fixed.md": "Not its own.\n"})
    assert _problems(repository) == []
    [line] = _problems(repository, "main")
    assert line.startswith("mcore-tensor: src changed and no fragment says how")
    repository.commit()
    arguments = ["--root", str(repository.root), "--base", "main"]
    assert main(arguments) == 1
    assert f"add {FRAGMENTS}/SLUG.KIND.md" in capsys.readouterr().out
    repository.write({f"{FRAGMENTS}/faster.changed.md": "Faster.\n"})
    assert main(arguments) == 0


def test_an_old_fragment_does_not_speak_for_a_new_change(repository: SampleRepository) -> None:
    repository.write({f"{FRAGMENTS}/old.added.md": "Before.\n"})
    base = repository.commit()
    repository.set_code("mcore-tensor", "x = 2\n")
    assert len(_problems(repository, base)) == 1


def test_a_changelog_is_edited_by_releases_only(repository: SampleRepository) -> None:
    file = "packages/mcore-tensor/CHANGELOG.md"
    text = repository.read(file)
    repository.write({file: f"{text}- More.\n"})
    [line] = _problems(repository, "main")
    assert line.startswith(
        f"mcore-tensor: CHANGELOG.md is written by releases: take it back and add {FRAGMENTS}/"
    )
    assert _problems(repository) == []
    repository.set_version("mcore-tensor", "0.2.0")
    heading = "## 0.2.0 (2026-02-03)"
    repository.write({file: text.replace("## 0.1.0", f"{heading}\n\n- More.\n\n## 0.1.0")})
    assert _problems(repository, "main") == []


def test_an_unknown_base_is_no_pass(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(repository.root), "--base", "nowhere"]) == 2
    assert "'nowhere' is not a revision" in capsys.readouterr().err


def test_a_version_needs_a_section_or_fragments(repository: SampleRepository) -> None:
    repository.set_version("mcore-tensor", "0.2.0")
    [line] = _problems(repository)
    assert line.startswith("mcore-tensor: nothing describes 0.2.0 of _version.py: add changelog.d/")
    repository.write({f"{FRAGMENTS}/new.added.md": "New.\n"})
    assert _problems(repository) == []
    file = "packages/mcore-tensor/CHANGELOG.md"
    repository.write({file: repository.read(file).replace("2026-01-01", "unreleased")})
    assert "has only what is released" in _problems(repository)[0]


def test_a_deleted_fragment_speaks_for_nothing(repository: SampleRepository) -> None:
    repository.write({f"{FRAGMENTS}/old.added.md": "Before.\n"})
    base = repository.commit()
    repository.set_code("mcore-tensor", "x = 2\n")
    (repository.root / FRAGMENTS / "old.added.md").unlink()
    [line] = _problems(repository, base)
    assert line.startswith("mcore-tensor: src changed and no fragment says how")


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
    said = section(after, Version("0.2.0"))
    assert said is not None
    assert said.startswith("### Added")
    assert said.endswith("- Old thing.")
    with pytest.raises(ChangelogError, match=r"a section for 0\.1\.0 already"):
        fold(package, Version("0.1.0"), DAY)
