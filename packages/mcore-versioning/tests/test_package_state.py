"""Tests of finding out, without an import, whether a package can work here."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from mcore.versioning import __version__
from mcore.versioning.package_state import PackageState, package_state

Install = Callable[..., Path]


def test_installed_package(install: Install) -> None:
    install(
        "some-lib",
        "1.2+cu128",
        module="some_lib",
        source="raise RuntimeError('imported')",
        metadata="Requires-Python: >=3.8",
        wheel="py3-none-any",
    )
    state = package_state("some_lib", "some-lib")
    assert state == PackageState("some-lib", "1.2+cu128", None)
    assert str(state) == "1.2+cu128"
    assert "some_lib" not in sys.modules


def test_absent_package() -> None:
    state = package_state("no_such_module", "no-such-distribution")
    assert state == PackageState("no-such-distribution", None, None)
    assert str(state) == "not installed"


def test_this_package() -> None:
    assert package_state("mcore.versioning", "mcore-versioning").version == __version__
    assert package_state("mcore.no_such_part", "mcore-no-such-part").version is None
    assert package_state("no_such_parent.child", "no-such").version is None
    assert package_state("mcore.versioning.config.child", "no-such").version is None


def test_reason_is_part_of_the_text() -> None:
    assert str(PackageState("x", None, "broken")) == "present but unusable: broken"


@pytest.mark.parametrize("version", ["main-branch", None])
def test_metadata_without_a_readable_version(version: str | None, install: Install) -> None:
    install("some-lib", version, module="some_lib")
    state = package_state("some_lib", "some-lib")
    assert state.version is None
    assert repr(version) in state.reason


def test_metadata_without_the_module(install: Install) -> None:
    install("some-lib", "1.2")
    state = package_state("some_lib", "some-lib")
    assert state.reason == "version 1.2 is recorded as installed, but there is no module some_lib"


def test_remains_of_an_uninstalled_module(install: Install, site: Path) -> None:
    install("some-lib", "1.2")
    (site / "some_lib" / "cache").mkdir(parents=True)
    reason = package_state("some_lib", "some-lib").reason
    assert reason == f"some_lib is only a folder without code: {site / 'some_lib'}"


def test_folder_of_that_name_where_nothing_is_installed(site: Path) -> None:
    (site / "some_lib").mkdir()
    reason = package_state("some_lib", "some-lib").reason
    assert reason == f"some_lib is only a folder without code: {site / 'some_lib'}"


def test_file_that_shadows_the_installed_module(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("some-lib", "1.2", module="some_lib")
    front = tmp_path / "front"
    front.mkdir()
    (front / "some_lib.py").write_text("")
    monkeypatch.syspath_prepend(front)
    reason = package_state("some_lib", "some-lib").reason
    assert f"found at {front / 'some_lib.py'}" in reason
    assert f"installed version 1.2 at {(site / 'some_lib' / '__init__.py').resolve()}" in reason


def test_editable_installation_shadows_nothing(install: Install, site: Path) -> None:
    install("some-lib", "1.2")
    (site / "some_lib.py").write_text("")
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_record_may_be_missing(install: Install, site: Path) -> None:
    install("some-lib", "1.2", module="some_lib", record=False)
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_libraries_beside_the_package_are_not_taken_for_it(install: Install, site: Path) -> None:
    info = install("some-lib", "1.2")
    (info / "RECORD").write_text("some_lib.libs/libsome_lib.so,,\nsome_lib/sub/__init__.py,,\n")
    (site / "some_lib.py").write_text("")
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_other_python_version_is_required(install: Install) -> None:
    install("some-lib", "1.2", module="some_lib", metadata="Requires-Python: >=3.99")
    running = ".".join(str(part) for part in sys.version_info[:3])
    reason = package_state("some_lib", "some-lib").reason
    assert reason == f"version 1.2 needs Python >=3.99, and this is {running}"


def test_unreadable_python_requirement_is_no_proof(install: Install) -> None:
    install("some-lib", "1.2", module="some_lib", metadata="Requires-Python: newest")
    assert package_state("some_lib", "some-lib").version == "1.2"


@pytest.mark.parametrize("tag", ["cp27-cp27mu-manylinux1_x86_64", "py3-none-plan9_mips"])
def test_wheel_for_another_platform(tag: str, install: Install) -> None:
    install("some-lib", "1.2", module="some_lib", wheel=tag)
    reason = package_state("some_lib", "some-lib").reason
    assert reason == f"version 1.2 was built for {tag}, which this Python can't load"


def test_one_fitting_tag_is_enough(install: Install) -> None:
    info = install("some-lib", "1.2", module="some_lib", wheel="cp27-cp27m-win32")
    with (info / "WHEEL").open("a") as wheel:
        wheel.write("Tag: py2.py3-none-any\n")
    assert package_state("some_lib", "some-lib").version == "1.2"


@pytest.mark.parametrize(
    ("requirement", "found", "reason"),
    [
        ("other-lib>=2.11", "2.13.0+cpu", None),
        ("other-lib>=2.11", "2.9", "version 1.2 needs other-lib>=2.11, and 2.9 is installed"),
        ("other-lib>=2.11", None, "version 1.2 needs other-lib>=2.11, which is not installed"),
        ("other-lib", None, "version 1.2 needs other-lib, which is not installed"),
        ("other-lib>=2.11", "2.11.0a0+nv25", None),
        ("other-lib>=2.11; python_version < '3.0'", None, None),
        ("other-lib>=2.11; extra == 'more'", None, None),
        ("other-lib>=2.11; python_version > '3.0'", "1", "2.11, and 1 is installed"),
        ("other-lib>=2.11", "unreadable", None),
        ("other-lib >>> 2", None, None),
    ],
)
def test_requirements(
    requirement: str, found: str | None, reason: str | None, install: Install
) -> None:
    install("some-lib", "1.2", module="some_lib", metadata=f"Requires-Dist: {requirement}")
    if found is not None:
        install("other-lib", found)
    state = package_state("some_lib", "some-lib")
    if reason is None:
        assert state.version == "1.2"
    else:
        assert state.reason.endswith(reason)


def test_only_watched_requirements_count(install: Install) -> None:
    install(
        "some-lib",
        "1.2",
        module="some_lib",
        metadata="Requires-Dist: absent-lib\nRequires-Dist: Other_Lib>2",
    )
    install("other-lib", "1.0")
    assert package_state("some_lib", "some-lib", watched=[]).version == "1.2"
    reason = package_state("some_lib", "some-lib", watched=["other-lib"]).reason
    assert reason == "version 1.2 needs Other_Lib>2, and 1.0 is installed"


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"some_lib.py": "__version__ = '2.0'\n"}, "2.0"),
        ({"some_lib.py": "__version__: str = '2.0'\n"}, "2.0"),
        ({"some_lib.py": "import os\nname = __version__ = '2.0'\n"}, "2.0"),
        ({"some_lib/__init__.py": "", "some_lib/_version.py": "__version__ = '2.1'\n"}, "2.1"),
        ({"some_lib/__init__.py": "", "some_lib/version.py": "__version__ = '2.1'\n"}, "2.1"),
        ({"some_lib.py": "__version__ = compute()\n"}, None),
        ({"some_lib.py": "__version__ = 5\n"}, None),
        ({"some_lib.py": "__version__ = 'main'\n"}, None),
        ({"some_lib.py": "this is no Python\n"}, None),
        ({"some_lib.py": ""}, None),
    ],
)
def test_source_tree_without_metadata(
    files: dict[str, str], version: str | None, site: Path
) -> None:
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    state = package_state("some_lib", "some-lib")
    assert state.version == version
    if version is None:
        assert "has no metadata and no readable version" in state.reason
    assert "some_lib" not in sys.modules


def test_loaded_module_is_not_asked(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("some-lib", "1.2", module="some_lib")
    monkeypatch.setitem(sys.modules, "some_lib", None)
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_finders_of_all_kinds_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if name != "some_lib":
                return None
            spec = ModuleSpec(name, None, origin="/nowhere/some_lib.py")
            spec.has_location = True
            return spec

    monkeypatch.setattr(sys, "meta_path", [object(), Finder()])
    reason = package_state("some_lib", "some-lib").reason
    assert reason == "some_lib at /nowhere/some_lib.py has no metadata and no readable version"
