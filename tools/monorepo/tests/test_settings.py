"""Faults in settings that no test of a package would notice."""

from pathlib import Path

import pytest

from monorepo.__main__ import CHECKS, main
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

TENSOR = "packages/mcore-tensor"
PYPROJECT = f"{TENSOR}/pyproject.toml"
CI = ".github/workflows/ci.yml"
HATCH = """\
[envs.default]
dependencies = ["torch=={matrix:torch:2.13.0}"]
[envs.versions]
matrix = [{ python = ["3.10", "3.11"] }]
[envs.matrix]
matrix = [{ python = ["3.10", "3.11"], torch = ["2.11.0", "2.13.0"] }]
"""
WORKFLOW = "jobs:\n  plan: {}\n  tests: {needs: plan}\n  check: {needs: [plan, tests]}\n"
TESTS = "def test_a(): ...\nclass TestB:\n    def test_c(self): ...\n"


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    """A repository without a fault."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-versioning")
    made.add_package("mcore-tensor", needs=("torch>=2.11", "mcore-versioning>=0.1,<0.2"))
    made.write(
        {
            f"{TENSOR}/tests/test_x.py": TESTS,
            "hatch.toml": HATCH,
            CI: WORKFLOW,
            "tools/some/tests/test_y.py": "def test_y(): ...\n",
            "tests-integration/test_z.py": "def test_z(): ...\n",
        }
    )
    return made


def _find(repository: SampleRepository) -> list[str]:
    workspace = load_workspace(repository.root)
    checks = ("settings", "ranges")
    return [problem for check in checks for problem in CHECKS[check](workspace, None)]


def test_a_sound_repository_passes(repository: SampleRepository) -> None:
    assert _find(repository) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (PYPROJECT, "torch>=2.11", "torch==2.13.0", "pins torch==2.13.0: users could not"),
        (PYPROJECT, "torch>=2.11", "torch", "mcore-tensor requires torch, which has no floor"),
        (PYPROJECT, "torch>=2.11", "torch<3,>=2.12", "no cell for torch 2.12 of mcore-tensor"),
        (PYPROJECT, "versioning>=0.1,<0.2", "versioning>=0.1", "a range with a floor and a cap"),
        ("hatch.toml", '"3.11"], torch', '], torch', "[envs.versions] and [envs.matrix] differ"),
        ("hatch.toml", '"2.11.0", ', "", "no cell for torch 2.11 of mcore-tensor on Python 3.10"),
        ("hatch.toml", ', "2.13.0"', "", "torch 2.13.0 of the default environment on Python 3.10"),
        (CI, "[plan, tests]", "[plan]", "check does not wait for tests, which could fail unseen"),
        (f"{TENSOR}/tests/x_test.py", None, "def test_y(): ...\n", "collects only test_*.py"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    repository: SampleRepository, file: str, old: str | None, new: str, expected: str
) -> None:
    if old is None:
        repository.write({file: new})
    else:
        repository.replace(file, old, new)
    assert expected in "\n".join(_find(repository))


def test_a_package_may_leave_the_floor_to_a_sibling(repository: SampleRepository) -> None:
    repository.add_package("mcore-upper", needs=("torch", "mcore-tensor>=0.1,<0.2"))
    assert _find(repository) == []
    repository.replace(PYPROJECT, "torch>=2.11", "torch")
    found = "\n".join(_find(repository))
    assert "mcore-tensor requires torch, which has no floor" in found
    assert "mcore-upper requires torch, which has no floor" in found


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweets"])
    assert "no check sweets; there are: settings, tree" in capsys.readouterr().err
