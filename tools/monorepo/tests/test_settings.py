"""Faults in settings that no test of a package would notice."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.__main__ import CHECKS, main
from monorepo.suites import lost_tests, with_raised_floor
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace

TENSOR = "packages/mcore-tensor"
PYPROJECT = f"{TENSOR}/pyproject.toml"
CI = ".github/workflows/ci.yml"
HATCH = """\
[envs.default]
dependencies = ["torch=={matrix:torch:2.13.0}"]
[envs.default.scripts]
test = "pytest"
[envs.versions]
matrix = [{ python = ["3.10", "3.11"] }]
[envs.matrix]
matrix = [{ python = ["3.10", "3.11"], torch = ["2.11.0", "2.13.0"] }]
"""
WORKFLOW = """\
jobs:
  plan: {runs-on: x, steps: [{run: hatch run test}, {run: python -m monorepo.plan}]}
  tests: {needs: plan, runs-on: x, steps: [{run: hatch run other:thing}]}
  check: {needs: [plan, tests], runs-on: x}
"""


# What a package of the sample needs besides, to be as those of this repository are.
TABLES = """
classifiers = [{classifiers}]
authors = [{{ name = "A" }}]
maintainers = [{{ name = "M" }}]
keywords = ["a"]
dependencies"""
URLS = """
[project.urls]
Homepage = "https://mcore.example"
Source = "https://mcore.example/tree/main/{folder}"
Changelog = "https://mcore.example/blob/main/{folder}/CHANGELOG.md"
Issues = "https://mcore.example/issues"

[tool.monorepo]
tests = 2
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SampleRepository:
    """A repository without a fault, which no test changes."""
    repository = SampleRepository(tmp_path_factory.mktemp("settings") / "repository")
    needs = ("torch>=2.11", "mcore-versioning>=0.1,<0.2")
    repository.add_package("mcore-versioning")
    repository.add_package("mcore-tensor", needs=needs)
    pythons = ", ".join(f'"Programming Language :: Python :: {each}"' for each in ("3.10", "3.11"))
    for name, siblings in (("versioning", ""), ("tensor", "packages/mcore-versioning ")):
        folder = f"packages/mcore-{name}"
        head, _, rest = repository.read(f"{folder}/pyproject.toml").partition("dependencies")
        rest = rest.replace('[project.urls]\nHomepage = "https://github.com/sample/sample"\n', "")
        text = f"{head}{TABLES.format(classifiers=pythons).strip()}{rest}"
        tests = "def test_a(): ...\nclass TestB:\n    def test_c(self): ...\n"
        repository.write(
            {
                f"{folder}/pyproject.toml": text + URLS.format(folder=folder),
                f"{folder}/tests/test_x.py": tests,
                f"{folder}/README.md": f"pip install {siblings}{folder}\n",
            }
        )
    repository.write(
        {
            "hatch.toml": HATCH,
            "pyproject.toml": "[tool.monorepo]\ntests = 1\n",
            "LICENSE": "Apache-2.0\n",
            "CITATION.cff": "url: https://mcore.example\n",
            CI: WORKFLOW,
            "tools/some/tests/test_y.py": "def test_y(): ...\n",
            "tests-integration/test_z.py": "def test_z(): ...\n",
        }
    )
    repository.commit()
    return repository


@pytest.fixture
def repository(sound: SampleRepository, tmp_path: Path) -> SampleRepository:
    shutil.copytree(sound.root, tmp_path / "repository")
    return SampleRepository(tmp_path / "repository")


def _found(repository: SampleRepository) -> list[str]:
    workspace = load_workspace(repository.root)
    checks = ("settings", "suites", "ranges")
    return [said for check in checks for said in CHECKS[check](workspace, None)]


def test_a_sound_repository_passes(sound: SampleRepository) -> None:
    assert _found(sound) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (f"{TENSOR}/LICENSE", "Apache", "Other", "LICENSE has to be a copy of the one at the root"),
        ("LICENSE", None, None, "there is no LICENSE at the root"),
        (PYPROJECT, '["LICENSE"]', "[]", "mcore-tensor: license-files has to be"),
        (f"{TENSOR}/src/mcore/tensor/py.typed", None, None, "py.typed is missing"),
        (
            f"{TENSOR}/src/mcore/__init__.py", None, "",
            "it would hide the other packages' part of the namespace mcore",
        ),
        ("packages/stray/README.md", None, "", "packages/stray has no pyproject.toml"),
        (
            f"{TENSOR}/README.md", None, None,
            "how to install from a clone: pip install packages/mcore-versioning packages/mcore-t",
        ),
        (PYPROJECT, 'keywords = ["a"]', "", "its page on an index would have no keywords"),
        (PYPROJECT, "example/issues", "example/bugs", "mcore-tensor: [project.urls] has to be"),
        ("CITATION.cff", "mcore.example", "github.com/a/b", "[project.urls] has to be"),
        (PYPROJECT, "torch>=2.11", "torch==2.13.0", "pins torch==2.13.0: users could not"),
        (PYPROJECT, "torch>=2.11", "torch", "mcore-tensor: requires torch, which has no floor"),
        (PYPROJECT, "torch>=2.11", "torch<3,>=2.12", "no cell for torch 2.12 of mcore-tensor"),
        (PYPROJECT, "versioning>=0.1,<0.2", "versioning==0.1.0", "a range with a floor and a cap"),
        (PYPROJECT, "versioning>=0.1,<0.2", "versioning>=0.1", "a range with a floor and a cap"),
        (PYPROJECT, ', "Programming Language :: Python :: 3.11"', "", "classifiers say Python"),
        (PYPROJECT, 'python = ">=3.10"', 'python = ">=3.11"', "leaves out Python 3.10"),
        ("hatch.toml", '"3.11"], torch', '], torch', "[envs.versions] and [envs.matrix] differ"),
        ("hatch.toml", '"2.11.0", ', "", "no cell for torch 2.11 of mcore-tensor on Python 3.10"),
        ("hatch.toml", ', "2.13.0"', "", "no cell for torch 2.13.0 of torch on Python 3.10, 3.11"),
        (CI, "needs: plan", "needs: plam", "tests needs plam, which is no job of it"),
        (CI, "[plan, tests]", "[plan]", "check does not wait for tests, which could fail unseen"),
        (CI, "hatch run test", "hatch run tests", "hatch.toml has no command tests"),
        (CI, "monorepo.plan", "monorepo.plam", "there is no module monorepo.plam"),
        (f"{TENSOR}/tests/x_test.py", None, "def test_y(): ...\n", "pytest collects test_*.py"),
        (f"{TENSOR}/tests/test_x.txt", None, "def test_y(): ...\n", "pytest collects test_*.py"),
        (f"{TENSOR}/tests/test_x.py", None, None, f"{PYPROJECT} promises 2 tests, and there are 0"),
        (f"{TENSOR}/tests/test_x.py", "test_c", "c", f"{PYPROJECT}: 3 tests on main, and now 2"),
        ("tools/some/tests/test_y.py", None, None, "pyproject.toml: 2 tests on main, and now 1"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    repository: SampleRepository, file: str, old: str | None, new: str | None, said: str
) -> None:
    if new is None:
        (repository.root / file).unlink()
    else:
        text = new if old is None else repository.read(file).replace(old, new)
        assert old is None or text != repository.read(file)
        repository.write({file: text})
    assert said in "\n".join(_found(repository))


def test_a_floor_of_tests_is_written_down_and_rises(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.branch("change")
    text = repository.read(PYPROJECT)
    raised = with_raised_floor(repository.root, repository.root / PYPROJECT)
    assert raised == text.replace("tests = 2", "tests = 3")
    repository.write({PYPROJECT: raised})
    assert list(lost_tests(repository.root, "main")) == []
    repository.write({f"{TENSOR}/tests/test_x.py": "def test_a(): ...\n"})
    repository.write({PYPROJECT: text.replace("tests = 2", "tests = 1")})
    assert list(lost_tests(repository.root, None)) == []
    command = ["suites", "--root", str(repository.root), "--base"]
    assert main([*command, "main"]) == 1
    assert f"{PYPROJECT}: the floor of its tests fell from 2 to 1" in capsys.readouterr().out
    assert main([*command, "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweets"])
    assert "no check sweets; there are: settings, suites" in capsys.readouterr().err


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A workflow of one step, beside this repository's own settings of zizmor."""
    folder = tmp_path / ".github"
    (folder / "workflows").mkdir(parents=True)
    (folder / "zizmor.yml").write_text((REPOSITORY / ".github/zizmor.yml").read_text())
    return folder


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("- {uses: actions/cache@v4}", "unpinned-uses"),
        ("- run: echo ${{ github.event.pull_request.title }}", "template-injection"),
        (f"- uses: actions/cache@{'0' * 40} # v4.2.0", ""),
    ],
)
def test_zizmor_with_our_settings_sees(planted: Path, step: str, fault: str) -> None:
    (planted / "workflows/ci.yml").write_text(
        f"on: push\npermissions: {{}}\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n"
        f"      {step}\n"
    )
    command = [str(Path(sys.executable).with_name("zizmor")), "--offline", "--quiet", str(planted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(fault), done.stdout
    assert fault in done.stdout
