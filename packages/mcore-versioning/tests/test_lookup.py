"""Tests of the comparison between installed and requested versions."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import InvalidVersion, Version

from mcore.versioning.lookup import is_at_least, owners_of, parse_version, recorded_version

NVIDIA = "2.9.0a0+50eac811a6.nv25.09"


@pytest.mark.parametrize(
    ("installed", "requested", "at_least", "newer"),
    [
        ("2.13.0+cpu", "2.13.0", True, False),
        ("2.13.0", "2.13", True, False),
        ("2.13.0+cpu", "2.13.0+cpu", True, False),
        ("2.13.0+cpu", "2.12.9", True, True),
        (NVIDIA, "2.9.0", False, False),
        (NVIDIA, "2.9.0a0", True, False),
        (NVIDIA, "2.8.0", True, True),
        ("2.10.0.dev20250901+cu128", "2.10.0", False, False),
        ("2.0.0rc1", "2.0.0", False, False),
        ("2.7.4.post1", "2.7.4", True, True),
        ("1.5.3", "1.5.3.post1", False, False),
    ],
)
def test_table_of_comparisons(installed: str, requested: str, at_least: bool, newer: bool) -> None:
    there, wanted = Version(installed), Version(requested)
    assert is_at_least(there, wanted, True) is at_least
    assert is_at_least(there, wanted, False) is newer


def test_release_only_leaves_a_post_release_newer() -> None:
    there = Version("2.7.1.post2")
    assert is_at_least(there, Version("2.7.1.post2"), release_only=True) is True
    assert is_at_least(there, Version("2.7.1"), False, release_only=True) is True
    assert is_at_least(there, Version("2.7.1.post3"), release_only=True) is False


def test_release_only_lets_a_build_of_a_coming_release_count_as_it() -> None:
    there = Version(NVIDIA)
    assert is_at_least(there, Version("2.9.0"), release_only=True) is True
    assert is_at_least(there, Version("2.9.0"), False, release_only=True) is False
    assert is_at_least(there, Version("2.9.1"), release_only=True) is False


def test_local_label_counts_where_the_request_has_one() -> None:
    assert is_at_least(Version("1.0+b"), Version("1.0+a"), False) is True
    assert is_at_least(Version("1.0+a"), Version("1.0+b"), False) is False


_release = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(
    lambda numbers: ".".join(str(number) for number in numbers)
)
_suffix = st.sampled_from(["", "a0", "b2", "rc1", ".dev3", ".post1", "a1.dev2", "rc1.post2"])
_local = st.sampled_from(["", "+cpu", "+cu128", "+1", "+50eac811a6.nv25.09"])
_versions = st.builds(lambda release, suffix: Version(release + suffix), _release, _suffix)
_labelled = st.builds(lambda public, local: Version(f"{public}{local}"), _versions, _local)


@settings(deadline=None)
@given(_labelled, _labelled)
def test_at_least_is_the_order_of_packaging(installed: Version, requested: Version) -> None:
    assert is_at_least(installed, requested) == (installed >= requested)


@settings(deadline=None)
@given(_labelled, _versions)
def test_newer_ignores_the_label_of_the_installed(installed: Version, requested: Version) -> None:
    expected = Version(str(installed).partition("+")[0]) > requested
    assert is_at_least(installed, requested, False) == expected


@settings(deadline=None)
@given(_labelled, _labelled)
def test_newer_with_a_label_on_the_request_is_the_order_of_packaging(
    installed: Version, requested: Version
) -> None:
    assume(requested.local is not None)
    assert is_at_least(installed, requested, False) == (installed > requested)


@settings(deadline=None)
@given(_labelled, _labelled, st.booleans())
def test_newer_implies_at_least(installed: Version, requested: Version, release_only: bool) -> None:
    if is_at_least(installed, requested, False, release_only=release_only):
        assert is_at_least(installed, requested, True, release_only=release_only)


@settings(deadline=None)
@given(_labelled, _versions, st.booleans())
def test_release_only_compares_the_release_numbers(
    installed: Version, requested: Version, check_equality: bool
) -> None:
    post = "" if installed.post is None else f".post{installed.post}"
    release = Version(".".join(str(number) for number in installed.release) + post)
    expected = release >= requested if check_equality else release > requested
    answer = is_at_least(installed, requested, check_equality, release_only=True)
    assert answer == expected


@settings(deadline=None)
@given(_labelled)
def test_text_and_version_mean_the_same(version: Version) -> None:
    assert parse_version(str(version)) == version
    assert parse_version(version) is version


@pytest.mark.parametrize("text", ["", "latest", "2.x", "1..2"])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidVersion):
        parse_version(text)


@pytest.mark.parametrize("value", [2.6, None, (2, 6)])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="a str or a packaging Version"):
        parse_version(value)


Install = Callable[..., Path]

# Prints the metadata files that a script opens, given as the first argument with its folder.
_OPENED = """
import os, sys
folder, script = sys.argv[1:]
sys.path.insert(0, folder)
import packaging.version
known = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
exec(compile(script, "script", "exec"), {"__name__": "acme_models.layers"})
print(*sorted(os.path.relpath(path, folder) for path in opened if path.startswith(folder)))
print(*sorted({"asyncio", "importlib.metadata", "inspect"} & set(sys.modules) - known))
"""


def _many(install: Install, count: int = 200) -> None:
    for number in range(count):
        install(f"library-{number}", module=f"package_{number}")


def _opened_by(script: str, folder: Path) -> tuple[list[str], list[str]]:
    finished = subprocess.run(
        [sys.executable, "-c", _OPENED, str(folder), script],
        capture_output=True,
        text=True,
        check=True,
    )
    files, loaded = finished.stdout.splitlines()
    return files.split(), loaded.split()


DECORATE = "import mcore.versioning as v\n@v.experimental_fn('1.0')\ndef f(): ..."


def test_first_gated_function_opens_its_own_distribution_among_200(
    install: Install, site: Path
) -> None:
    _many(install)
    install("acme-models", "1.2", module="acme_models")
    files, loaded = _opened_by(DECORATE, site)
    assert set(files) == {
        "acme_models-1.2.dist-info/METADATA",
        "acme_models-1.2.dist-info/RECORD",
    }
    assert len(files) <= 4
    assert loaded == []


def test_distribution_of_another_name_is_found_by_one_file_of_each(
    install: Install, site: Path
) -> None:
    _many(install, 50)
    install("big-project", "1.2", module="acme_models")
    files, loaded = _opened_by(DECORATE, site)
    others = [name for name in files if not name.startswith("big_project")]
    assert sorted(others) == sorted(f"library_{n}-1.0.dist-info/RECORD" for n in range(50))
    assert loaded == []


def test_distribution_of_the_same_name_that_brought_another_package(install: Install) -> None:
    install("acme-models", "1.0", module="something_else")
    install("big-project", "2.0", module="acme_models")
    assert owners_of("acme_models") == {"big-project": "2.0"}


@pytest.mark.parametrize("file", ["acme.py", "acme.abi3.so", "acme/__init__.pyd", "acme/x/y.py"])
def test_owner_by_each_kind_of_file(file: str, install: Install) -> None:
    info = install("odd-name", "3.0")
    (info / "RECORD").write_text(f"{file},sha256=x,3\nacme_too/__init__.py,,\n")
    assert owners_of("acme") == {"odd-name": "3.0"}
    assert owners_of("odd_name") == {}


def test_signs_in_a_name_stand_for_themselves(install: Install) -> None:
    info = install("odd-name", "3.0")
    (info / "RECORD").write_text("c++acme/__init__.py,,\n")
    assert owners_of("c++acme") == {"odd-name": "3.0"}


def test_submodule_of_a_shared_namespace_has_one_owner(install: Install) -> None:
    for part in ("storage", "compute"):
        info = install(f"acme-{part}", module=None)
        (info / "RECORD").write_text(f"acme/{part}/__init__.py,,\n")
    assert set(owners_of("acme")) == {"acme-storage", "acme-compute"}
    assert set(owners_of("acme.compute")) == {"acme-compute"}


def test_old_and_editable_installations(site: Path, install: Install) -> None:
    egg = site / "Old_Tool.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Old.Tool\nVersion: 0.9\n")
    (egg / "top_level.txt").write_text("oldtool\n_oldtool\n")
    editable = install("edited", "0.3")
    (editable / "RECORD").write_text("__editable__.edited-0.3.pth,,\n")
    (editable / "top_level.txt").write_text("edited_package\n")
    assert owners_of("_oldtool") == {"Old.Tool": "0.9"}
    assert owners_of("edited_package") == {"edited": "0.3"}
    assert recorded_version("old-tool") == "0.9"


def test_places_that_are_no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "archive.zip").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "archive.zip"), "/no/such/place", tmp_path])
    assert owners_of("packaging") == {}
    assert recorded_version("packaging") is None


def test_an_empty_entry_of_the_path_is_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, site: Path, install: Install
) -> None:
    install("here", "1.5", module="here")
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.chdir(site)
    assert recorded_version("here") == "1.5"
    assert owners_of("here") == {"here": "1.5"}


def test_a_body_is_not_read_as_metadata(install: Install) -> None:
    install("talkative", None, metadata="Summary: x\n\nVersion: 6.6")
    assert recorded_version("talkative") is None


def test_really_installed_distributions_are_those_of_the_standard_library() -> None:
    names = sorted({name for names in packages_distributions().values() for name in names})
    assert {name: recorded_version(name) for name in names} == {
        name: version(name) for name in names
    }
