"""Tests of installing a distribution alone, with tiny wheels and without an index."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from monorepo.isolation.__main__ import main, needed
from monorepo.isolation.checks import IsolationError, check_contents, check_siblings
from monorepo.isolation.run import IsolationRun, _floors, install_lowest, run_tests
from monorepo.isolation.venv import CleanVenv, find_uv, make_venv
from monorepo.isolation.wheels import build_wheels
from monorepo.tests.sample_repository import SampleRepository
from monorepo.tests.sample_wheel import write_wheel
from monorepo.workspace import Workspace, load_workspace

ROOT = Path(__file__).parents[3]


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all that uv knows of."""
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
    made.write({"pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\n'})
    made.write({"tools/rank_testing/__init__.py": "answer = 42\n"})
    return made


def installed(workspace: Workspace, tmp_path: Path, name: str) -> CleanVenv:
    """An environment with a package and what it brings."""
    target = workspace[name]
    wheels = build_wheels(needed(workspace, [name]), tmp_path / "wheels")
    constraints = [f"{other} @ {wheel.as_uri()}" for other, wheel in wheels.items()]
    venv = make_venv(tmp_path / "venv", sys.executable, constraints)
    venv.install([f"{target.name} @ {wheels[target.name].as_uri()}"])
    return venv


@pytest.mark.usefixtures("links")
def test_package_comes_with_its_siblings_and_no_other(
    repository: SampleRepository, tmp_path: Path
) -> None:
    refuses = "raise ModuleNotFoundError('needs x: pip install \"mcore-middle[x]\"')\n"
    repository.write({"packages/mcore-middle/src/mcore/middle/of_an_extra.py": refuses})
    workspace = load_workspace(repository.root)
    venv = installed(workspace, tmp_path, "mcore-middle")
    assert venv.installed() == {"mcore-base": "0.1.0", "mcore-middle": "0.1.0"}
    check_contents(workspace, workspace["mcore-middle"], venv)


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    ("needs", "stray", "said"),
    [
        ((), "", r"(?s)cannot be imported.*mcore.base"),
        (("mcore-base>=0.1",), "packages/mcore-middle/src/mcore/other", r"mcore\.other can be imp"),
    ],
    ids=["deleted dependency", "module of another package"],
)
def test_what_does_not_stand_alone_is_named(
    repository: SampleRepository, tmp_path: Path, needs: tuple[str, ...], stray: str, said: str
) -> None:
    repository.add_package("mcore-middle", needs=needs, code="import mcore.base\n")
    if stray:
        repository.write({f"{stray}/__init__.py": ""})
    workspace = load_workspace(repository.root)
    venv = installed(workspace, tmp_path, "mcore-middle")
    with pytest.raises(IsolationError, match=said):
        check_contents(workspace, workspace["mcore-middle"], venv)


@pytest.mark.parametrize(
    ("package", "beside", "message"),
    [
        ("mcore-tensor", {"torch", "mcore-versioning"}, None),
        ("mcore-tensor", {"torch"}, r"came with \[\]; its dependencies lead to"),
        ("mcore-tensor", {"torch", "mcore-versioning", "mcore-parallel"}, "came with"),
        ("mcore-tensor", {"mcore-versioning"}, "needs torch, which is missing"),
        ("mcore-versioning", set(), None),
        ("mcore-versioning", {"torch"}, "does not need torch, which is installed"),
    ],
)
def test_siblings_and_torch_are_compared_both_ways(
    package: str, beside: set[str], message: str | None
) -> None:
    workspace = load_workspace(ROOT)
    found = dict.fromkeys({package, *beside, "pytest"}, "1.0")
    if message is None:
        check_siblings(workspace, workspace[package], found)
        return
    with pytest.raises(IsolationError, match=message):
        check_siblings(workspace, workspace[package], found)


def test_lowest_versions_are_those_of_direct_requirements(links: Path, tmp_path: Path) -> None:
    for version in ("1.0", "1.5", "2.0"):
        write_wheel(links, "direct", version, "transitive>=1.0")
        write_wheel(links, "transitive", version)
    venv = make_venv(tmp_path / "venv", sys.executable, [])
    install_lowest([], ["direct>=1.2"], venv)
    assert venv.installed() == {"direct": "1.5", "transitive": "2.0"}


def test_floor_that_another_requirement_raises_is_found(links: Path, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        write_wheel(links, "low", version)
    write_wheel(links, "high", "1.0", "low>=2")
    venv = make_venv(tmp_path / "venv", sys.executable, [])
    with pytest.raises(IsolationError, match=r"(?s)raise one of them: .*low==1\.0.*low>=2"):
        install_lowest([], ["low>=1", "high>=1"], venv)


def test_constraints_of_a_run_are_torch_the_wheels_and_the_groups_limits(tmp_path: Path) -> None:
    workspace = load_workspace(ROOT)
    wheel = tmp_path / "x.whl"
    run = IsolationRun(workspace, {"mcore-observe": wheel}, tmp_path, "python", "2.13.0", True)
    observe = workspace["mcore-observe"]
    held = list(run._constraints(observe))
    assert held[0] == "torch==2.13.0"
    assert held[1:-1] == [str(one) for one in observe.lowest_constraints]
    assert held[-1] == f"mcore-observe @ {wheel.as_uri()}"
    asked = _floors(observe)
    assert "torch>=2.11" not in asked
    assert not any(one.startswith("mcore-") for one in asked)
    assert {Requirement(one).name for one in asked} >= {"mlflow", "tensorboard", "wandb"}


@pytest.fixture
def here(tmp_path: Path) -> CleanVenv:
    """The environment that runs this test, which has pytest."""
    uv = find_uv()
    assert uv is not None
    return CleanVenv(Path(sys.prefix), uv, ())


def outcome(repository: SampleRepository, here: CleanVenv, outside: Path, test: str) -> None:
    """Run a test of mcore-base outside its repository."""
    repository.write({"packages/mcore-base/tests/test_it.py": test})
    workspace = load_workspace(repository.root)
    run_tests(workspace, workspace["mcore-base"], here, outside)


def test_tests_run_beside_the_readme_and_the_rank_helper_without_sources(
    repository: SampleRepository,
    here: CleanVenv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repository.root / "tools"))
    settings = '[tool.pytest.ini_options]\npythonpath = ["tools"]\n'
    repository.write({"pyproject.toml": settings, "tools/monorepo_absent/__init__.py": ""})
    test = (
        "import importlib.util, os, pathlib, rank_testing\n"
        "def test_where():\n"
        "    here = pathlib.Path(__file__).parents[1]\n"
        f"    assert not here.is_relative_to({str(repository.root)!r})\n"
        "    assert (here / 'README.md').is_file() and not (here / 'src').exists()\n"
        "    assert 'PYTHONPATH' not in os.environ\n"
        "    assert rank_testing.answer == 42\n"
        "    assert importlib.util.find_spec('monorepo_absent') is None\n"
        "import pytest\ndef test_no(): pytest.skip('needs a CUDA device')\n"
    )
    outcome(repository, here, tmp_path / "outside", test)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def test_no():\n    assert False\n", "ended with status 1"),
        ("", "ended with status 5"),
        (
            "import pytest\ndef test_no():\n    pytest.importorskip('absent_library')\n",
            r"(?s)skipped for want of a module.*test_no.*absent_library",
        ),
        ("import pytest\npytest.importorskip('absent_library')\n", "ended with status 5"),
    ],
)
def test_failure_and_gap_are_errors(
    repository: SampleRepository, here: CleanVenv, tmp_path: Path, test: str, message: str
) -> None:
    with pytest.raises(IsolationError, match=message):
        outcome(repository, here, tmp_path / "outside", test)


def test_wrong_name_ends_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcore-lost"]) == 2
    assert "'mcore-lost' is not a package here" in capsys.readouterr().err


_PASSING_PYTEST = """
import pathlib, sys
(report,) = [each.partition("=")[2] for each in sys.argv if each.startswith("--junitxml=")]
pathlib.Path(report).write_text("<testsuites/>")
"""


def test_command_goes_from_files_to_a_status(
    repository: SampleRepository, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(links, "pytest", "8.3", code=_PASSING_PYTEST)
    write_wheel(links, "pytest", "9.0", code="raise SystemExit(1)\n")
    hatch = '[envs.default]\ndependencies = ["torch=={matrix:torch:2.13.0}"]\n'
    repository.write({"hatch.toml": hatch})
    for name in ("base", "middle", "other"):
        file = f"packages/mcore-{name}/pyproject.toml"
        repository.write({file: repository.read(file).replace("pytest>=8.3", "pytest<9")})
    assert main(["mcore-middle", "--root", str(repository.root)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("mcore-middle: stands alone")
    repository.set_code("mcore-base", "import mcore.other\n")
    assert main(["--root", str(repository.root)]) == 1
    lines = capfd.readouterr().out.splitlines()[-3:]
    assert ["FAILED" in line for line in lines] == [True, False, True]
