"""Faults in settings that no test of a package would notice."""

import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.ranges import misfits
from monorepo.settings import matrix_problems, package_problems, workflow_problems
from monorepo.suites import lost_tests, lowered_floors, main, skipped_files, with_raised_floor
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace

TENSOR = "packages/mcore-tensor"
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


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path / "repository")
    repository.add_package("mcore-versioning")
    needs = ("torch>=2.11", "mcore-versioning>=0.1,<0.2")
    repository.add_package("mcore-tensor", needs=needs)
    for name in ("versioning", "tensor"):
        file = f"packages/mcore-{name}/pyproject.toml"
        python = [f'"Programming Language :: Python :: {one}"' for one in ("3", "3.10", "3.11")]
        added = f"classifiers = [{', '.join(python)}]\ndependencies"
        text = repository.read(file).replace("dependencies", added, 1)
        repository.write({file: f"{text}\n[tool.monorepo]\ntests = 2\n"})
        tests = "def test_a(): ...\nclass TestB:\n    def test_c(self): ...\n"
        repository.write({f"packages/mcore-{name}/tests/test_x.py": tests})
    for name, siblings in (("versioning", ""), ("tensor", "packages/mcore-versioning ")):
        folder = f"packages/mcore-{name}"
        repository.write({f"{folder}/README.md": f"pip install {siblings}{folder}\n"})
    repository.write(
        {"hatch.toml": HATCH, "LICENSE": "Apache-2.0\n", ".github/workflows/ci.yml": WORKFLOW}
    )
    repository.commit()
    return repository


def _found(repository: SampleRepository) -> list[str]:
    workspace = load_workspace(repository.root)
    return [
        *package_problems(workspace),
        *matrix_problems(workspace),
        *workflow_problems(workspace),
        *map(str, misfits(workspace)),
        *skipped_files(workspace.root),
        *lost_tests(workspace),
    ]


def test_a_sound_repository_passes(repository: SampleRepository) -> None:
    assert _found(repository) == []


def test_this_repository_passes() -> None:
    for module in ("settings", "suites"):
        command = [sys.executable, "-m", f"monorepo.{module}"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


PYPROJECT = f"{TENSOR}/pyproject.toml"
CI = ".github/workflows/ci.yml"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (f"{TENSOR}/LICENSE", "Apache", "Other", "LICENSE has to be a copy of the one at the root"),
        (f"{TENSOR}/src/mcore/tensor/py.typed", None, None, "py.typed is missing"),
        (
            f"{TENSOR}/src/mcore/__init__.py", None, "",
            "it would hide the other packages' part of the namespace mcore",
        ),
        ("packages/stray/README.md", None, "", "packages/stray has no pyproject.toml"),
        (
            f"{TENSOR}/README.md", "packages/mcore-versioning ", "",
            "how to install from a clone: pip install packages/mcore-versioning packages/mcore-t",
        ),
        (PYPROJECT, "torch>=2.11", "torch==2.13.0", "pins torch==2.13.0: users could not"),
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
        (f"{TENSOR}/tests/test_x.py", None, None, "has 0 tests, and 2 is the floor"),
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


def test_a_floor_of_tests_may_only_rise(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.branch("change")
    text = repository.read(PYPROJECT)
    package = load_workspace(repository.root)["mcore-tensor"]
    raised = with_raised_floor(package, text)
    assert raised == text.replace("tests = 2", "tests = 3")
    repository.write({PYPROJECT: raised})
    assert list(lowered_floors(load_workspace(repository.root), "main")) == []
    repository.write({PYPROJECT: text.replace("tests = 2", "tests = 1")})
    assert main(["--root", str(repository.root), "--base", "main"]) == 1
    assert "mcore-tensor: the floor of its tests fell from 2 to 1" in capsys.readouterr().out
    assert main(["--root", str(repository.root), "--base", "nowhere"]) == 2


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
