"""Tests of the comparison between installed and requested versions."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import InvalidVersion, Version

from mcore.versioning.lookup import is_at_least, parse_version

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
    release = Version(".".join(str(number) for number in installed.release))
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
