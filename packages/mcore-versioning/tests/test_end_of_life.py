"""Tests of the rule that code must not stay experimental forever."""

import logging
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from mcore.versioning import __version__, experimental, experimental_fn
from mcore.versioning.experimental import (
    _find_owners,
    has_expired,
    owner_version,
    warn_if_expired,
)


@pytest.mark.parametrize(
    ("introduced", "current", "expired"),
    [
        ("0.1.0", "0.4.0", False),
        ("0.1.0", "0.5.0", True),
        ("0.19.0", "1.0.0", True),
        ("1.2.0", "0.20.0", False),
    ],
)
def test_table_of_lifetimes(introduced: str, current: str, expired: bool) -> None:
    assert has_expired(Version(introduced), Version(current), 3) is expired


@settings(deadline=None)
@given(
    st.integers(0, 3), st.integers(0, 30), st.integers(0, 3), st.integers(0, 30), st.integers(0, 9)
)
def test_lifetime_counts_minors_within_a_major(
    major: int, minor: int, current_major: int, current_minor: int, lifetime: int
) -> None:
    introduced = Version(f"{major}.{minor}")
    current = Version(f"{current_major}.{current_minor}.7")
    last = (major, minor + lifetime)
    expected = (current_major, current_minor) > last
    assert has_expired(introduced, current, lifetime) is expected


def _expired(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_warning_names_the_object_and_both_versions(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_expired(test_table_of_lifetimes, "0.1.0", 3, "0.5.0")
    (text,) = _expired(caplog)
    assert "test_table_of_lifetimes" in text
    assert "has reached end of life" in text
    assert "0.1.0" in text
    assert "0.5.0" in text
    assert caplog.records[0].name == "mcore.versioning"


def test_only_rank_zero_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    warn_if_expired(test_table_of_lifetimes, "0.1.0", 3, "0.5.0")
    assert caplog.records == []


def test_fresh_code_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_expired(test_table_of_lifetimes, "0.1.0", 3, "0.4.0")
    warn_if_expired(test_table_of_lifetimes, "0.1.0", 4, "0.5.0")
    assert caplog.records == []


def test_owner_of_a_module_of_this_namespace() -> None:
    assert owner_version("mcore.versioning.config") == Version(__version__)
    assert owner_version("mcore.versioning") == Version(__version__)
    assert owner_version("mcore") is None
    assert owner_version("mcore.nothing.of.this.name") is None


def test_owner_of_a_foreign_module(install: Callable[..., Path]) -> None:
    install("oddly-named", "7.1", module="foreignpkg")
    assert owner_version("foreignpkg.deep.inside") == Version("7.1")


def test_owner_that_lists_its_packages(install: Callable[..., Path]) -> None:
    info = install("oddly-named", "7.1", record=False)
    (info / "top_level.txt").write_text("foreignpkg\nother\n")
    assert owner_version("foreignpkg.deep") == Version("7.1")


def test_owner_whose_files_are_not_recorded_is_found_by_its_name(
    install: Callable[..., Path],
) -> None:
    install("foreign-pkg", "7.2", record=False)
    assert owner_version("foreign_pkg.deep") == Version("7.2")


def test_package_of_two_distributions_has_no_owner(install: Callable[..., Path]) -> None:
    install("first-part", "1.0", module="sharedspace")
    install("second-part", "2.0", module="sharedspace")
    assert owner_version("sharedspace.x") is None


@pytest.mark.parametrize("module", ["", "__main__", "nowhere.to.be.found"])
def test_unknown_owner(module: str) -> None:
    assert owner_version(module) is None


@pytest.mark.parametrize("version", ["not a version", None])
def test_unreadable_version_of_the_owner_is_unknown(
    version: str | None, install: Callable[..., Path]
) -> None:
    install("foreign-pkg", version, record=False)
    assert owner_version("foreign_pkg") is None


def test_owner_decides_where_no_current_version_is_given(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def owner(module: str) -> Version:
        asked.append(module)
        return Version("0.9.0")

    monkeypatch.setattr(experimental, "owner_version", owner)

    def old() -> None: ...

    old.__module__ = "mcore.tensor.buffers"
    experimental_fn("0.2.0")(old)
    assert asked == ["mcore.tensor.buffers"]
    assert len(_expired(caplog)) == 1


@pytest.mark.parametrize(
    ("package", "distribution"),
    [("packaging", "packaging"), ("_pytest", "pytest"), ("pytest", "pytest")],
)
def test_owners_of_packages_that_are_really_installed(package: str, distribution: str) -> None:
    assert owner_version(f"{package}.inside") == Version(version(distribution))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the peer overlooks some distributions")
def test_owners_are_those_that_the_standard_library_finds() -> None:
    found = packages_distributions()
    for name in ("_pytest", "pytest", "packaging", "hypothesis", "pluggy", "not_there"):
        assert _find_owners(name) == frozenset(found.get(name, ()))


@pytest.mark.parametrize(
    ("file", "owned"),
    [
        ("foreignpkg.py", True),
        ("foreignpkg.cpython-311-x86_64-linux-gnu.so", True),
        ("foreignpkg/deep/er.pyd", True),
        ('"foreignpkg/a,b.py"', True),
        ("foreignpkg/table.csv", False),
        ("foreignpkg_too/__init__.py", False),
        ("foreignpkg.libs/libfortran.so", False),
        ("other/foreignpkg/__init__.py", False),
        ("foreignpkg-1.0.dist-info/RECORD", False),
    ],
)
def test_a_recorded_module_makes_an_owner(
    file: str, owned: bool, install: Callable[..., Path]
) -> None:
    info = install("oddly-named", "7.1")
    (info / "RECORD").write_text(f"oddly_named-7.1.dist-info/METADATA,,\n{file},sha256=x,3\n")
    assert owner_version("foreignpkg") == (Version("7.1") if owned else None)


def test_the_installed_are_read_once_for_a_package(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("oddly-named", "7.1", module="foreignpkg")
    assert owner_version("foreignpkg") == Version("7.1")
    monkeypatch.setattr("importlib.metadata.distributions", list)
    assert owner_version("foreignpkg") == Version("7.1")


def test_a_script_has_no_owner_although_a_distribution_installed_a_main_module(
    install: Callable[..., Path],
) -> None:
    info = install("carelessly-packaged", "7.1")
    (info / "RECORD").write_text("__main__.py,,\n")
    assert owner_version("__main__") is None


def test_a_lifetime_of_no_release_ends_with_the_next_one() -> None:
    assert not has_expired(Version("0.1.0"), Version("0.1.9"), 0)
    assert has_expired(Version("0.1.0"), Version("0.2.0"), 0)
    experimental_fn("0.1.0", max_lifetime=0)  # accepted
