"""Building, installing and testing a package alone, with tiny wheels and without an index."""

import shutil
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from monorepo.isolation.__main__ import main
from monorepo.isolation.run import (
    build_floor_wheels,
    check_contents,
    check_siblings,
    collect_needed,
    find_floor_tags,
    run_tests,
)
from monorepo.isolation.venv import CleanVenv, IsolationError, build_wheels, make_venv
from monorepo.release.__main__ import main as release
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
HATCH = """\
[envs.default]
dependencies = ["torch=={matrix:torch:2.13.0}"]
[envs.dev]
extra-dependencies = ["pytest>=8"]
"""


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only source of uv."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty-index").as_uri())
    (tmp_path / "empty-index").mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base")
    made.add_package("mcore-middle", needs=("mcore-base>=0.1,<0.2",), code="import mcore.base\n")
    made.add_package("mcore-other")
    settings = '[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\npythonpath = ["tools"]\n'
    made.write({"pyproject.toml": settings, "hatch.toml": HATCH})
    made.write({"tools/rank_testing/__init__.py": "answer = 42\n", "tools/standin/x.py": ""})
    return made


def write_wheel(folder: Path, name: str, version: str, *needs: str, code: str = "") -> Path:
    """Write a wheel with one module of its name."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def read(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(file).decode()


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("needs", "stray", "error"),
    [
        (("mcore-base>=0.1",), "", ""),
        ((), "", r"(?s)cannot be imported.*mcore.base"),
        (("mcore-base>=0.1",), "packages/mcore-middle/src/mcore/other", r"mcore\.other can be imp"),
    ],
    ids=["complete", "deleted dependency", "module of another package"],
)
def test_package_brings_its_siblings_and_no_other(
    repository: SampleRepository, tmp_path: Path, needs: tuple[str, ...], stray: str, error: str
) -> None:
    repository.add_package("mcore-middle", needs=needs, code="import mcore.base\n")
    refuses = "raise ModuleNotFoundError('needs x: pip install \"mcore-middle[x]\"')\n"
    repository.write({"packages/mcore-middle/src/mcore/middle/of_an_extra.py": refuses})
    if stray:
        repository.write({f"{stray}/__init__.py": ""})
    workspace = load_workspace(repository.root)
    wheels = build_wheels(collect_needed(workspace, ["mcore-middle"]), tmp_path / "wheels")
    located = {name: f"{name} @ {wheel.as_uri()}" for name, wheel in wheels.items()}
    venv = make_venv(tmp_path / "venv", sys.executable, located.values())
    venv.install(located["mcore-middle"])
    with pytest.raises(IsolationError, match=error) if error else nullcontext():
        check_contents(workspace, workspace["mcore-middle"], venv)
    if needs:
        assert venv.installed() == {"mcore-base": "0.1.0", "mcore-middle": "0.1.0"}


@pytest.mark.parametrize(
    ("package", "installed", "message"),
    [
        ("mcore-tensor", {"torch"}, r"brought \[\], but its dependencies lead to"),
        ("mcore-tensor", {"torch", "mcore-versioning", "mcore-parallel"}, "brought"),
        ("mcore-tensor", {"mcore-versioning"}, "needs torch, which is missing"),
        ("mcore-versioning", {"torch"}, "does not need torch, which is installed"),
    ],
)
def test_siblings_and_torch_are_compared_both_ways(
    package: str, installed: set[str], message: str
) -> None:
    workspace = load_workspace(REPOSITORY)
    found = dict.fromkeys({package, *installed, "pytest"}, "1.0")
    with pytest.raises(IsolationError, match=message):
        check_siblings(workspace, workspace[package], found)


def test_lowest_versions_are_those_of_direct_requirements(links: Path, tmp_path: Path) -> None:
    for version in ("1.0", "1.5", "2.0"):
        write_wheel(links, "direct", version, "transitive>=1.0")
        write_wheel(links, "transitive", version)
    write_wheel(links, "low", "1.0")
    write_wheel(links, "low", "2.0")
    write_wheel(links, "high", "1.0", "low>=2")
    venv = make_venv(tmp_path / "venv", sys.executable, [])
    venv.pin_lowest(["direct>=1.2"]).install("direct")
    assert venv.installed() == {"direct": "1.5", "transitive": "2.0"}
    with pytest.raises(IsolationError, match=r"low>=2 and low==1\.0"):
        venv.pin_lowest(["low>=1", "high>=1"]).install("high")


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            "import importlib.util, os, pathlib, pytest, rank_testing\n"
            "def test_where():\n"
            "    here = pathlib.Path(__file__).parents[1]\n"
            "    assert not here.is_relative_to(os.environ['REPOSITORY'])\n"
            "    assert (here / 'README.md').is_file() and not (here / 'src').exists()\n"
            "    assert (here / 'tests' / '.hidden').is_file()\n"
            "    assert 'PYTHONPATH' not in os.environ\n"
            "    assert rank_testing.answer == 42\n"
            "    assert importlib.util.find_spec('monorepo_absent') is None\n"
            "def test_no(): pytest.skip('needs a CUDA device')\n",
            None,
        ),
        ("def test_no():\n    assert False\n", "ended with status 1"),
        (
            "import pytest\ndef test_no():\n    pytest.importorskip('absent_library')\n",
            r"(?s)skipped because a module is missing.*test_no.*absent_library",
        ),
    ],
)
def test_tests_run_without_sources_and_fail_on_gaps(
    repository: SampleRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str,
    message: str | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(repository.root / "tools"))
    monkeypatch.setenv("REPOSITORY", str(repository.root))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take most of the time
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p hypothesispytest")
    repository.write({"tools/monorepo_absent/__init__.py": ""})
    tests = "packages/mcore-base/tests"
    repository.write({f"{tests}/test_it.py": test, f"{tests}/.hidden": ""})
    workspace = load_workspace(repository.root)
    here = CleanVenv(Path(sys.prefix))  # which has pytest
    with pytest.raises(IsolationError, match=message) if message else nullcontext():
        run_tests(workspace, workspace["mcore-base"], here, tmp_path / "outside")


_PASSING_PYTEST = """
import pathlib, sys
(report,) = [each.partition("=")[2] for each in sys.argv if each.startswith("--junitxml=")]
pathlib.Path(report).write_text("<testsuites/>")
"""


def test_command_prints_a_result_per_package(
    repository: SampleRepository, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(links, "pytest", "8.3", code=_PASSING_PYTEST)
    write_wheel(links, "pytest", "9.0", code="raise SystemExit(1)\n")
    for name in ("base", "middle", "other"):
        repository.replace(f"packages/mcore-{name}/pyproject.toml", "pytest>=8.3", "pytest<9")
    assert main(["mcore-middle", "--root", str(repository.root)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("mcore-middle: works alone")
    repository.set_code("mcore-base", "import mcore.other\n")
    assert main(["--root", str(repository.root)]) == 1
    lines = capfd.readouterr().out.splitlines()[-3:]
    assert ["FAILED" in line for line in lines] == [True, False, True]
    assert main(["mcore-lost"]) == 2
    assert "'mcore-lost' is not a package here" in capfd.readouterr().err


_PYTEST = """
import sys; sys.path[:0] = ["tools"]
import mcore.base, mcore.middle, pathlib
import pretrain
places = {mcore.base.__file__, mcore.middle.__file__}
assert all(place.startswith(sys.prefix) for place in places), places
tests = sorted(path.name for path in pathlib.Path("tests-integration").iterdir())
print("ran", *sys.argv[1:], *tests)
raise SystemExit(int("--fail" in sys.argv))
"""


def test_the_main_jobs_tests_run_on_all_wheels_together(
    repository: SampleRepository, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(links, "pytest", "8.3", code=_PYTEST)
    write_wheel(links, "torch", "2.13.0")
    names = ("pretrain_runs.py", "test_pretrain_x.py", "test_sources.py")
    repository.write({f"tests-integration/{name}": "" for name in names})
    repository.write({"tools/pretrain/__init__.py": "", "tools/pretrain/tests/test_x.py": ""})
    root = ["--root", str(repository.root)]
    assert main([*root, "--together", "-k", "losses"]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == "mcore-base, mcore-other, mcore-middle import from one environment"
    assert second.startswith("ran ")
    assert second.endswith(" tests-integration -k losses pretrain_runs.py test_pretrain_x.py")
    shutil.rmtree(repository.root / "packages/mcore-other")  # whose wheel takes its time
    assert main([*root, "--together", "--fail"]) == 1
    repository.set_code("mcore-middle", "import mcore.gone\n")
    assert main([*root, "--together"]) == 1
    assert "mcore-middle cannot be imported:" in capfd.readouterr().err
    repository.set_version("mcore-base", "0.2.0")
    assert main([*root, "--together"]) == 1
    assert "mcore-base>=0.1,<0.2" in capfd.readouterr().err


def test_floors_use_siblings_of_their_lowest_tags(
    repository: SampleRepository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floors = ["--root", str(repository.root), "floors", "mcore-middle"]
    repository.commit()
    assert release(floors) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no release of mcore-base fits mcore-base>=0.1,<0.2: its present sources are used",
        "mcore-middle has no sibling with a release tag: nothing to test",
    ]
    for version, code in (("0.0.9", "old = 1"), ("0.1.0", "old = 1"), ("0.1.1", "new = 1")):
        repository.set_version("mcore-base", version)
        repository.set_code("mcore-base", code)
        repository.commit(f"mcore-base-v{version}")
    repository.set_code("mcore-middle", "from mcore.base import new\n")
    workspace = load_workspace(repository.root)
    tags = find_floor_tags(workspace, "mcore-middle")
    assert [tag.name for tag in tags.values()] == ["mcore-base-v0.1.0"]
    wheels = build_floor_wheels(workspace, "mcore-middle", tags, tmp_path / "floors")
    assert {name: wheel.name for name, wheel in wheels.items()} == {
        "mcore-middle": "mcore_middle-0.1.0-py3-none-any.whl",
        "mcore-base": "mcore_base-0.1.0-py3-none-any.whl",
    }
    assert read(wheels["mcore-base"], "mcore/base/__init__.py") == "old = 1"
    assert "new" in read(wheels["mcore-middle"], "mcore/middle/__init__.py")
