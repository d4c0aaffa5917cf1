"""Tests of the state of packages, found without an import, and of the report about them."""

import json
import platform
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mcore.versioning import (
    __version__,
    clear_version_cache,
    get_fa_version,
    get_package_version,
    is_fa_min_version,
)
from mcore.versioning.__main__ import main
from mcore.versioning.environment import (
    EnvironmentReport,
    PackageState,
    environment_report,
    package_state,
)

Install = Callable[..., Path]
NAMES = [
    "torch",
    "transformer-engine",
    "flash-attn",
    "mamba-ssm",
    "causal-conv1d",
    "mcore-versioning",
    "mcore-tensor",
    "mcore-parallel",
    "mcore-modules",
    "mcore-observe",
]
REPORT = EnvironmentReport(
    "CPython 3.11.7",
    "Linux-x86_64",
    (
        PackageState("torch", "2.13.0+cpu"),
        PackageState("flash-attn"),
        PackageState("mcore-tensor", None, "version 0.1.0 needs torch>=2.11"),
    ),
)


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


def test_package_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("packed_lib.py", "")
        archive.writestr("packed_lib-1.2.dist-info/METADATA", "Name: packed-lib\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "packed.zip")
    assert package_state("packed_lib", "packed-lib") == PackageState("packed-lib", "1.2")


def test_absent_package() -> None:
    state = package_state("no_such_module", "no-such-distribution")
    assert state == PackageState("no-such-distribution", None, None)
    assert str(state) == "not installed"


def test_this_package() -> None:
    assert package_state("mcore.versioning", "mcore-versioning").version == __version__
    assert package_state("mcore.no_such_part", "mcore-no-such-part").version is None
    assert package_state("no_such_parent.child", "no-such").version is None
    assert package_state("mcore.versioning.config.child", "no-such") == PackageState("no-such")


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


@pytest.mark.parametrize("record", ["RECORD", "SOURCES.txt"])
@pytest.mark.parametrize("file", ["some_lib/__init__.py", "some_lib.cpython-311-linux.so"])
def test_file_that_shadows_the_installed_module(
    file: str,
    record: str,
    install: Install,
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = install("some-lib", "1.2", record=False)
    (info / record).write_text(f"{file}{',,' if record == 'RECORD' else ''}\n")
    (site / file).parent.mkdir(exist_ok=True)
    (site / file).write_text("")  # from Python 3.12 on, files that are missing are skipped
    front = tmp_path / "front"
    front.mkdir()
    (front / "some_lib.py").write_text("")
    monkeypatch.syspath_prepend(front)
    reason = package_state("some_lib", "some-lib").reason
    assert f"found at {front / 'some_lib.py'}" in reason
    assert f"installed version 1.2 at {(site / file).resolve()}" in reason


def test_a_link_to_the_folder_of_the_package_shadows_nothing(
    install: Install, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("some-lib", "1.2", module="some_lib")
    link = tmp_path / "link"
    link.symlink_to(site)
    monkeypatch.syspath_prepend(link)
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_editable_installation_shadows_nothing(install: Install, site: Path) -> None:
    install("some-lib", "1.2")
    (site / "some_lib.py").write_text("")
    assert package_state("some_lib", "some-lib").version == "1.2"


@pytest.mark.parametrize("file", ["some_lib.pth", "some_lib.pyi"])
def test_files_that_are_no_modules_shadow_nothing(file: str, install: Install, site: Path) -> None:
    info = install("some-lib", "1.2")
    (info / "RECORD").write_text(f"{file},,\n")
    (site / file).write_text("")
    (site / "some_lib").mkdir()
    (site / "some_lib" / "__init__.py").write_text("")
    assert package_state("some_lib", "some-lib").version == "1.2"


def test_a_source_with_null_bytes_has_no_version(site: Path) -> None:
    (site / "some_lib.py").write_bytes(b"__version__ = '1.2'\n\0")
    reason = package_state("some_lib", "some-lib").reason
    assert reason is not None
    assert "no metadata and no readable version" in reason


def test_a_pre_release_meets_a_requirement_that_excludes_its_release(install: Install) -> None:
    # The oldest supported packaging leaves pre-releases out unless it is asked for them.
    install("some-base", "2.9.0a1")
    install("some-lib", "1.2", module="some_lib", metadata="Requires-Dist: some-base!=2.9.0")
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
    assert reason == f"version 1.2 needs Python >=3.99, but this is {running}"


def test_a_pre_release_of_python_counts_as_its_release(
    monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    major, minor, micro = sys.version_info[:3]
    required = f"Requires-Python: >={major}.{minor}.{micro}"
    install("some-lib", "1.2", module="some_lib", metadata=required)
    monkeypatch.setattr(platform, "python_version", lambda: f"{major}.{minor}.{micro}rc1")
    assert str(package_state("some_lib", "some-lib")) == "1.2"


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
        ("other-lib>=2.11", "2.9", "version 1.2 needs other-lib>=2.11, but 2.9 is installed"),
        ("other-lib>=2.11", None, "version 1.2 needs other-lib>=2.11, which is not installed"),
        ("other-lib", None, "version 1.2 needs other-lib, which is not installed"),
        ("other-lib>=2.11", "2.11.0a0+nv25", None),
        ("other-lib>=2.11; python_version < '3.0'", None, None),
        ("other-lib>=2.11; extra == 'more'", None, None),
        ("other-lib>=2.11; python_version > '3.0'", "1", "2.11, but 1 is installed"),
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
    assert reason == "version 1.2 needs Other_Lib>2, but 1.0 is installed"


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


@pytest.mark.parametrize("origin", ["/nowhere/some_lib.py", "/no\0where/some_lib.py"])
def test_finders_of_all_kinds_are_asked(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if name != "some_lib":
                return None
            spec = ModuleSpec(name, None, origin=origin)
            spec.has_location = True
            return spec

    monkeypatch.setattr(sys, "meta_path", [object(), Finder()])
    reason = package_state("some_lib", "some-lib").reason
    assert reason == f"some_lib at {origin} has no metadata and no readable version"


def test_text() -> None:
    assert REPORT.as_text() == (
        "Python        CPython 3.11.7\n"
        "platform      Linux-x86_64\n"
        "torch         2.13.0+cpu\n"
        "flash-attn    not installed\n"
        "mcore-tensor  present but unusable: version 0.1.0 needs torch>=2.11"
    )


def test_json() -> None:
    content = json.loads(REPORT.as_json())
    assert content["python"] == "CPython 3.11.7"
    assert content["platform"] == "Linux-x86_64"
    assert content["packages"] == [
        {"name": "torch", "status": "installed", "version": "2.13.0+cpu", "reason": None},
        {"name": "flash-attn", "status": "not installed", "version": None, "reason": None},
        {
            "name": "mcore-tensor",
            "status": "present but unusable",
            "version": None,
            "reason": "version 0.1.0 needs torch>=2.11",
        },
    ]


def test_report_of_this_environment() -> None:
    report = environment_report()
    assert [package.name for package in report.packages] == NAMES
    assert platform.python_version() in report.python
    versions = {package.name: package.version for package in report.packages}
    assert versions["mcore-versioning"] == __version__


def test_torch_floor_of_a_library_is_checked(install: Callable[..., Path]) -> None:
    install("torch", "2.0", module="torch")
    install(
        "flash-attn",
        "2.7",
        module="flash_attn",
        metadata="Requires-Dist: absent-lib\nRequires-Dist: torch>=2.11",
    )
    states = {package.name: package for package in environment_report().packages}
    expected = "present but unusable: version 2.7 needs torch>=2.11, but 2.0 is installed"
    assert str(states["flash-attn"]) == expected


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr().out
    report = environment_report()
    assert output == (report.as_json() if arguments else report.as_text()) + "\n"


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--jsno", 2)])
def test_help_and_typing_errors_collect_nothing(argument: str, status: int) -> None:
    code = (
        "import sys\nfrom mcore.versioning.__main__ import main\n"
        f"try: main([{argument!r}])\n"
        "finally: assert not {'mcore.versioning.environment', 'platform'} & set(sys.modules)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == status, finished.stderr
    shown = finished.stdout + finished.stderr
    assert shown.startswith("usage: python -m mcore.versioning [-h] [--json]\n")


def test_module_runs_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mcore.versioning", "--json"])
    monkeypatch.delitem(sys.modules, "mcore.versioning.__main__")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("mcore.versioning", run_name="__main__")
    assert caught.value.code == 0
    assert [package["name"] for package in json.loads(capsys.readouterr().out)["packages"]] == NAMES


def test_nothing_that_is_reported_is_imported() -> None:
    code = (
        "import sys; from mcore.versioning.__main__ import main; main([])\n"
        "loaded = {'torch', 'numpy', 'transformer_engine', 'flash_attn', 'mcore.tensor'}\n"
        "assert loaded.isdisjoint(sys.modules), loaded & set(sys.modules)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("Python  ")


def test_program_of_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    finished = subprocess.run(
        [sys.executable, "-m", "mcore.versioning"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines())
    assert lines["mcore-versioning"] == __version__
    assert lines["flash-attn"].startswith("present but unusable: flash_attn is only a folder")


METADATA = b"Metadata-Version: 2.1\nName: odd-package\nVersion: 2.7.4\n"
ODD = {
    "latin metadata": {"METADATA": METADATA + b"Author: J\xf6rg\n"},
    "byte order mark": {"METADATA": b"\xef\xbb\xbf" + METADATA},
    "columns of RECORD": {"METADATA": METADATA, "RECORD": b"odd_package/__init__.py,,,,extra\n"},
    "lines of RECORD": {"METADATA": METADATA, "RECORD": b"\nodd_package/__init__.py,,\n\n"},
    "latin RECORD": {"METADATA": METADATA, "RECORD": b"odd_package/\xf6.py,,\n"},
    "size in RECORD": {"METADATA": METADATA, "RECORD": b"odd_package/__init__.py,sha256=a,big\n"},
    "tag": {"METADATA": METADATA, "WHEEL": b"Wheel-Version: 1.0\nTag: cp311\n"},
    "marker": {"METADATA": METADATA + b'Requires-Dist: torch; os_name ~= "posix"\n'},
}


@pytest.mark.parametrize("files", ODD.values(), ids=ODD)
def test_odd_metadata_is_no_crash(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_package").mkdir()
    (tmp_path / "odd_package" / "__init__.py").write_text("raise RuntimeError('no GPU')")
    folder = tmp_path / "odd_package-2.7.4.dist-info"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    assert package_state("odd_package", "odd-package") == PackageState("odd-package", "2.7.4")
    assert get_package_version("odd_package", "odd-package") == Version("2.7.4")


def test_a_marker_that_cannot_be_evaluated_hides_no_other_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_package.py").write_text("")
    folder = tmp_path / "odd_package-2.7.4.dist-info"
    folder.mkdir()
    lines = b'Requires-Dist: a; os_name ~= "posix"\nRequires-Dist: no-such-thing>=2\n'
    (folder / "METADATA").write_bytes(METADATA + lines)
    monkeypatch.syspath_prepend(tmp_path)
    reason = package_state("odd_package", "odd-package").reason
    assert reason == "version 2.7.4 needs no-such-thing>=2, which is not installed"


class BrokenFinder:
    def find_spec(self, name: str, *_: object) -> None:
        if name == "flash_attn":
            raise RuntimeError("finder broke")


def test_a_finder_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [BrokenFinder(), *sys.meta_path])
    states = {state.name: state for state in environment_report().packages}
    assert states["flash-attn"].reason == (
        "looking for flash_attn raises RuntimeError('finder broke')"
    )
    assert states["mcore-versioning"].status == "installed"
    assert is_fa_min_version("1.0") is False


@pytest.mark.parametrize("entry", [b"/tmp", None, 3, Path("/tmp")])
def test_entries_of_the_path_that_are_no_text(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, entry])
    clear_version_cache()
    assert get_package_version("no_such_module") is None
    assert get_package_version("packaging") is not None
    assert len(environment_report().as_text().splitlines()) == 12


@pytest.mark.parametrize(
    "source",
    [
        *("raise RuntimeError('CUDA required')", "def f(:", "import sys; sys.exit(3)"),
        *("assert False, 'no GPU'", "import os; os.environ['NO_SUCH_HOME']"),
    ],
)
def test_a_package_that_fails_to_import_is_no_crash(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    clear_version_cache()
    assert is_fa_min_version("2.0") is False
    with pytest.raises(PackageNotFoundError):
        get_fa_version()
