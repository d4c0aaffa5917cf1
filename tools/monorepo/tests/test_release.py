"""Preparing, showing and verifying releases on temporary repositories."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest

from monorepo.isolation.venv import build
from monorepo.release.__main__ import main
from monorepo.release.prepare import Plan, ReleaseError, plan_release
from monorepo.release.verify import verify_archives, verify_release
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

VERSIONING = "packages/mcore-versioning"
TENSOR = "packages/mcore-tensor"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    return SampleRepository(tmp_path / "repository")


@pytest.fixture
def released(repository: SampleRepository) -> SampleRepository:
    """Three released packages that need each other."""
    repository.add_package("mcore-versioning", code="def f(a): ...\n")
    repository.add_package("mcore-tensor", needs=("mcore-versioning>=0.1,<0.2",))
    needs = ("mcore-versioning>=0.1,<0.2", "mcore-tensor>=0.1,<0.2")
    repository.add_package("mcore-parallel", needs=needs)
    names = ("mcore-versioning", "mcore-tensor", "mcore-parallel")
    repository.commit(*(f"{name}-v0.1.0" for name in names))
    return repository


def _run(repository: SampleRepository, *arguments: str) -> int:
    return main(["--root", str(repository.root), *arguments])


def _changed(repository: SampleRepository, code: str, kind: str = "added") -> None:
    repository.set_code("mcore-versioning", code)
    repository.write({f"{VERSIONING}/changelog.d/g.{kind}.md": "About `g`.\n"})


def _plan(repository: SampleRepository, step: str | None) -> Plan:
    return plan_release(load_workspace(repository.root), "mcore-versioning", step, date(2026, 2, 3))


def _refused(repository: SampleRepository, name: str, tag: str | None = None) -> Sequence[str]:
    return verify_release(load_workspace(repository.root), name, tag=tag).refused


def test_prepare_writes_only_on_request(
    released: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(released, "def f(a): ...\ndef g(): ...\n")
    assert _run(released, "prepare", "mcore-versioning", "minor", "--apply") == 1
    assert "commit or stash your work first, such as packages/" in capsys.readouterr().err
    released.commit()
    before = released.files()
    assert _run(released, "prepare", "mcore-versioning", "minor") == 0
    shown = capsys.readouterr().out
    assert released.files() == before
    assert "Nothing was written" in shown
    days = [date.today()]
    assert _run(released, "prepare", "mcore-versioning", "minor", "--apply") == 0
    days.append(date.today())  # which may be another
    after = released.files()
    assert after[f"{VERSIONING}/src/mcore/versioning/_version.py"] == '__version__ = "0.2.0"\n'
    assert any(
        f"## 0.2.0 ({day})\n\n### Added\n\n- About `g`.\n\n## 0.1.0"
        in after[f"{VERSIONING}/CHANGELOG.md"]
        for day in days
    )
    assert f"{VERSIONING}/changelog.d/g.added.md" not in after
    # Nothing broke: the caps move, the floors stay.
    assert '"mcore-versioning>=0.1,<0.3"' in after[f"{TENSOR}/pyproject.toml"]
    assert '"mcore-tensor>=0.1,<0.2"' in after["packages/mcore-parallel/pyproject.toml"]
    note = after[f"{TENSOR}/changelog.d/takes-mcore-versioning-0-2-0.changed.md"]
    assert "`mcore-versioning>=0.1,<0.3`" in note
    assert "once merged: hatch run release push --apply mcore-versioning" in shown
    assert shown.index("packages/mcore-tensor\n") < shown.index("packages/mcore-parallel\n")
    touched = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert len(touched) == 7


def test_a_break_raises_the_floor_of_the_dependants(released: SampleRepository) -> None:
    _changed(released, "def f(): ...\n", "changed")
    plan = _plan(released, "minor")
    assert plan.notes[-1] == (
        "breaks users: PARAMETER_REMOVED mcore.versioning.f: a (positional or keyword) -> (nothing)"
    )
    text = plan.contents[released.root.resolve() / TENSOR / "pyproject.toml"]
    assert '"mcore-versioning>=0.2,<0.3"' in text


def test_a_break_needs_a_minor_bump_and_a_word_in_the_changelog(released: SampleRepository) -> None:
    _changed(released, "def f(): ...\n", "fixed")
    with pytest.raises(ReleaseError, match="PARAMETER_REMOVED"):
        _plan(released, "patch")
    with pytest.raises(ReleaseError, match="nothing under Changed or Removed"):
        _plan(released, "minor")


def test_the_version_goes_up_by_the_steps_of_hatch(released: SampleRepository) -> None:
    _changed(released, "def f(a): ...\n", "fixed")
    plan = _plan(released, "patch")
    assert {path.name for path in plan.contents} == {"_version.py", "CHANGELOG.md"}
    steps = {"patch": "0.1.1", "minor,rc": "0.2.0rc0", "0.4.0": "0.4.0"}
    assert {step: str(_plan(released, step).tag.version) for step in steps} == steps
    for step, message in (
        ("0.1.0", "not newer than mcore-versioning-v0.1.0"),
        (None, "choose how to raise it"),
        ("0.0.9", "not higher than the original"),
        ("sideways", "sideways"),
    ):
        with pytest.raises(ReleaseError, match=message):
            _plan(released, step)


def test_the_first_release_takes_the_version_of_the_files(repository: SampleRepository) -> None:
    repository.add_package("mcore-versioning")
    repository.write({f"{VERSIONING}/CHANGELOG.md": "# C\n"})
    repository.write({f"{VERSIONING}/changelog.d/first-release.added.md": "- All.\n"})
    repository.commit()
    plan = _plan(repository, None)
    [text] = plan.contents.values()
    assert text == "# C\n\n## 0.1.0 (2026-02-03)\n\n### Added\n\n- All.\n"


def test_nothing_to_release_stops_it(
    released: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(released, "prepare", "mcore-versioning", "minor") == 1
    assert "nothing describes 0.2.0" in capsys.readouterr().err
    assert _run(released, "prepare", "mcore-nothing", "minor") == 2


def test_show_lists_what_is_unreleased(
    released: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(released, "def f(a): ...\ndef g(): ...\n")
    released.write({f"{TENSOR}/tests/test_x.py": "\n", f"{TENSOR}/README.md": "# New\n"})
    assert _run(released, "show") == 0
    assert capsys.readouterr().out.splitlines() == [
        "mcore-versioning 0.1.0: 1 shipped files changed since mcore-versioning-v0.1.0",
        f"  {VERSIONING}/src/mcore/versioning/__init__.py",
        "  changelog.d/g.added.md: About `g`.",
        "mcore-tensor 0.1.0: nothing shipped changed since mcore-tensor-v0.1.0",
        "mcore-parallel 0.1.0: nothing shipped changed since mcore-parallel-v0.1.0",
    ]


def test_notes_are_what_the_changelog_says_about_the_version(
    released: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(released, "notes", "mcore-tensor") == 0
    assert capsys.readouterr().out == "### Added\n\n- All.\n"
    released.set_version("mcore-tensor", "0.2.0")
    assert _run(released, "notes", "mcore-tensor") == 1
    assert "has nothing under '## 0.2.0 (YYYY-MM-DD)'" in capsys.readouterr().err


def test_a_prepared_release_is_verified_and_an_unprepared_one_is_not(
    released: SampleRepository,
) -> None:
    _changed(released, "def f(a): ...\ndef g(): ...\n")
    [refused] = _refused(released, "mcore-versioning")
    assert "changed since mcore-versioning-v0.1.0 and still has version 0.1.0" in refused
    assert "src/mcore/versioning/__init__.py" in refused
    released.commit()
    assert _run(released, "prepare", "mcore-versioning", "minor", "--apply") == 0
    released.commit("mcore-versioning-v0.2.0")
    tag = "refs/tags/mcore-versioning-v0.2.0"
    assert _refused(released, "mcore-versioning", tag) == ()
    released.set_version("mcore-versioning", "0.0.9")
    assert (
        "mcore-versioning 0.0.9 is older than its last release, mcore-versioning-v0.2.0"
        in _refused(released, "mcore-versioning")
    )


def test_tag_and_version_have_to_agree(released: SampleRepository) -> None:
    assert _refused(released, "mcore-tensor", "mcore-tensor-v0.1.0") == ()
    [line] = _refused(released, "mcore-tensor", "mcore-tensor-v0.1.1")
    assert line == "mcore-tensor-v0.1.1 is tagged, but _version.py has 0.1.0"
    [line] = _refused(released, "mcore-tensor", "mcore-versioning-v0.1.0")
    assert line == "mcore-versioning-v0.1.0 is a tag of mcore-versioning, not of mcore-tensor"


def test_a_tag_beside_main_is_refused(released: SampleRepository) -> None:
    main = released.git("rev-parse", "HEAD").strip()
    released.git("checkout", "--quiet", "--orphan", "beside")
    released.git("commit", "--quiet", "--message", "Not main's.")
    tag = "mcore-tensor-v0.1.0"
    other = f"{tag} is set at another commit than HEAD: check it out, or git tag --delete {tag}"
    beside = "HEAD is no commit of main: merge it first"
    assert _refused(released, "mcore-tensor", tag)[:2] == (beside, other)
    released.git("tag", "--force", tag)  # the very files of main, and no commit of it
    assert _refused(released, "mcore-tensor", tag)[:1] == (beside,)
    released.git("checkout", "--quiet", main)
    assert _refused(released, "mcore-tensor", tag) == (other,)
    released.git("branch", "--delete", "--force", "main")
    assert "there is no branch main" in _refused(released, "mcore-tensor", tag)[0]


def test_what_is_left_to_do_is_said_before_the_tag_and_refused_at_it(
    released: SampleRepository,
) -> None:
    released.add_package("mcore-late", needs=("mcore-never>=0.1,<0.2",))
    released.add_package("mcore-never")
    released.replace("packages/mcore-late/pyproject.toml", "github.com/sample", "mcore.example")
    released.write({"packages/mcore-late/changelog.d/late.fixed.md": "Late.\n"})
    released.commit()
    left = [
        "mcore-late still has changelog.d/late.fixed.md: run release prepare",
        "mcore-late requires mcore-never>=0.1,<0.2; release mcore-never first",
        "[project.urls] of mcore-late have to name the repository, with CITATION.cff",
    ]
    assert list(_refused(released, "mcore-late", "mcore-late-v0.1.0")) == left
    early = verify_release(load_workspace(released.root), "mcore-late")
    assert early.refused == ()
    assert list(early.notes) == [f"before its tag: {line}" for line in left]


def test_tags_are_pushed_one_by_one(
    released: SampleRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is verified after the one before it is there."""
    released.git("tag", "--delete", "mcore-tensor-v0.1.0", "mcore-parallel-v0.1.0")
    remote = tmp_path / "remote"
    released.git("clone", "--quiet", "--bare", ".", str(remote))
    released.git("remote", "add", "origin", str(remote))
    released.git("fetch", "--quiet", "origin")
    hook = remote / "hooks/post-receive"
    hook.write_text("#!/bin/sh\necho push: $(cut -d' ' -f3) >> pushes\n")
    hook.chmod(0o755)
    assert _run(released, "push") == 0
    assert capsys.readouterr().out.splitlines() == [
        "git tag mcore-tensor-v0.1.0; git push origin mcore-tensor-v0.1.0",
        "git tag mcore-parallel-v0.1.0; git push origin mcore-parallel-v0.1.0",
        "Nothing was pushed; add --apply to push each tag alone.",
    ]
    assert not (remote / "pushes").exists()
    released.write({f"{TENSOR}/README.md": "# Not committed\n"})
    assert _run(released, "push", "--apply") == 1
    assert f"commit or stash your work first, such as {TENSOR}" in capsys.readouterr().err
    released.git("restore", ".")
    assert _run(released, "push", "mcore-parallel", "--apply") == 1
    assert "release mcore-tensor first" in capsys.readouterr().err
    assert _run(released, "push", "--apply") == 0
    assert (remote / "pushes").read_text().splitlines() == [
        "push: refs/tags/mcore-tensor-v0.1.0",
        "push: refs/tags/mcore-parallel-v0.1.0",
    ]
    assert _run(released, "push", "--apply") == 0
    assert len((remote / "pushes").read_text().splitlines()) == 2


def test_verify_refuses_ranges_and_breaks(released: SampleRepository) -> None:
    _changed(released, "def f(): ...\n", "fixed")
    released.set_version("mcore-versioning", "0.2.0")
    refused = _refused(released, "mcore-versioning")
    assert any("mcore-tensor requires mcore-versioning>=0.1,<0.2, which" in one for one in refused)
    assert any("nothing under Changed or Removed" in one for one in refused)
    released.set_version("mcore-versioning", "0.1.1")
    refused = _refused(released, "mcore-versioning")
    assert any(one.startswith("PARAMETER_REMOVED mcore.versioning.f") for one in refused)


def test_missing_and_foreign_files_of_archives_are_refused(
    released: SampleRepository,
) -> None:
    wheel = "[tool.hatch.build.targets.wheel]\n"
    released.replace(f"{TENSOR}/pyproject.toml", wheel, f'{wheel}exclude = ["l.py"]\n')
    released.replace(f"{TENSOR}/pyproject.toml", 'readme = "README.md"\n', "")
    source = f"{TENSOR}/src/mcore"
    released.write({f"{source}/__init__.py": "", f"{source}/tensor/l.py": "x=1"})
    released.write({f"{source}/more/__init__.py": ""})
    (released.root / source / "tensor/py.typed").unlink()
    package = load_workspace(released.root)["mcore-tensor"]
    found = "\n".join(verify_archives(package, None))
    for expected in (
        "long_description",
        "has mcore/__init__.py, which is not part of mcore.tensor",
        "lacks mcore/tensor/py.typed",
        "has mcore/more/__init__.py",
        "W101",
    ):
        assert expected in found


def test_names_of_archives_have_to_agree_with_the_sources(
    released: SampleRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dist"
    build(released.root / TENSOR, folder)
    command = ("verify", "mcore-tensor", "--tag", "mcore-tensor-v0.1.0", "--archives", str(folder))
    assert _run(released, *command) == 0
    assert capsys.readouterr().out == "mcore-tensor 0.1.0 may be published\n"
    released.set_version("mcore-tensor", "0.1.1")
    assert _run(released, *command) == 1
    files = ["mcore_tensor-0.1.0-py3-none-any.whl", "mcore_tensor-0.1.0.tar.gz"]
    wanted = f"has {files}, and has to have mcore_tensor-0.1.1-py3-none-any.whl and"
    assert wanted in capsys.readouterr().err
