"""The test matrix of a change, on git repositories in temporary folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monorepo.plan import main
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import Cell, list_dev_dependencies, read_cells, read_torch_pin

HATCH = """
[envs.default]
dependencies = ["numpy", "torch=={matrix:torch:2.13.0}"]
[envs.dev]
extra-dependencies = ["pytest"]
[[envs.matrix.matrix]]
python = ["3.10", "3.11", "3.12"]
torch = ["2.11.0", "2.13.0"]
[[envs.matrix.matrix]]
python = ["3.14", "3.12"]
torch = ["2.13.0"]
"""
ALL = ["mcore-versioning", "mcore-tensor", "mcore-parallel", "mcore-modules", "mcore-observe"]
PYTHONS = ["3.10", "3.14"]

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    """The five packages with a commit on main, and a new branch."""
    made = SampleRepository(tmp_path / "repository")
    siblings: tuple[str, ...] = ()
    for name in ("mcore-versioning", "mcore-tensor", "mcore-parallel"):
        torch = ("torch>=2.11",) if siblings else ()
        made.add_package(name, needs=(*torch, *(f"{one}>=0.1,<0.2" for one in siblings)))
        siblings = (*siblings, name)
    for name in ("mcore-modules", "mcore-observe"):
        made.add_package(name, needs=("torch>=2.11", "mcore-parallel>=0.1,<0.2"))
    made.write({"hatch.toml": HATCH, "README.md": "# All\n", "tests-integration/test_x.py": ""})
    made.commit()
    made.git("checkout", "-b", "work")
    return made


@pytest.fixture
def plan(repository: SampleRepository, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Commit the changes and read the plan against main."""

    def read(base: str = "main") -> dict[str, Any]:
        repository.commit()
        assert main(["--base", base, "--root", str(repository.root)]) == 0
        printed = capsys.readouterr()
        assert printed.out.count("\n") == 1
        made: dict[str, Any] = json.loads(printed.out)
        assert printed.err == made["reason"] + "\n"
        return made

    return read


def cells(made: dict[str, Any], package: str) -> list[tuple[str, str | None]]:
    """Python and torch of the jobs of a package."""
    jobs = [job for job in made["include"] if job["package"] == package]
    return [(job["python"], job.get("torch")) for job in jobs]


def test_a_change_is_tested_in_all_cells_and_its_dependants_at_the_ends(
    repository: SampleRepository, plan: Plan
) -> None:
    repository.set_code("mcore-tensor", "answer = 42\n")
    made = plan()
    assert made["packages"] == ALL[1:]
    assert cells(made, "mcore-tensor") == [
        ("3.10", "2.11.0"), ("3.10", "2.13.0"), ("3.11", "2.11.0"), ("3.11", "2.13.0"),
        ("3.12", "2.11.0"), ("3.12", "2.13.0"), ("3.14", "2.13.0"),
    ]  # fmt: skip
    for package in ALL[2:]:
        assert cells(made, package) == [("3.10", "2.11.0"), ("3.14", "2.13.0")]
    assert (made["integration"], made["reason"], made["pythons"]) == (True, "changed", PYTHONS)


def test_package_without_torch_has_no_torch_axis(repository: SampleRepository, plan: Plan) -> None:
    repository.set_code("mcore-versioning", "answer = 42\n")
    made = plan()
    versioning = [job for job in made["include"] if job["package"] == "mcore-versioning"]
    assert versioning == [
        {"package": "mcore-versioning", "python": python}
        for python in ("3.10", "3.11", "3.12", "3.14")
    ]
    assert made["packages"] == ALL


@pytest.mark.parametrize(
    "path",
    [
        "hatch.toml", "new-root-file", "tools/README.md", ".github/workflows/ci.yml",
        "packages/loose-file", "packages/mcore-gone/src/x.py",
    ],
)  # fmt: skip
def test_a_file_of_no_package_concerns_all(
    repository: SampleRepository, plan: Plan, path: str
) -> None:
    repository.write({path: HATCH + "\n" if path == "hatch.toml" else "changed\n"})
    made = plan()
    assert made["packages"] == ALL
    assert len(made["include"]) == 4 * 7 + 4
    assert made["integration"] is True
    assert made["reason"] == f"everything: {path} changed"


def test_documents_and_integration_tests_concern_no_package(
    repository: SampleRepository, plan: Plan
) -> None:
    nothing = {"include": [], "packages": [], "pythons": PYTHONS, "integration": False}
    assert plan() == {**nothing, "reason": "nothing changed"}
    names = ("README.md", ".github/CONTRIBUTING.md", "packages/mcore-tensor/README.md")
    fragment = "packages/mcore-tensor/changelog.d/new.added.md"
    repository.write(dict.fromkeys((*names, fragment), "New words.\n"))
    assert plan() == {**nothing, "reason": "only documents changed"}
    repository.write({"tests-integration/test_x.py": "answer = 42\n"})
    assert plan() == {**nothing, "integration": True, "reason": "changed"}
    repository.set_code("mcore-observe", "answer = 42\n")
    assert plan()["packages"] == ["mcore-observe"]


def test_only_changes_of_the_branch_count_and_a_move_counts_twice(
    repository: SampleRepository, plan: Plan
) -> None:
    old = repository.root / "packages/mcore-modules/src/mcore/modules/a thing.py"
    old.write_text("".join(f"name_{number} = {number}\n" for number in range(50)))
    repository.commit()
    repository.git("branch", "--force", "main")
    old.rename(repository.root / "packages/mcore-observe/src/mcore/observe/a thing.py")
    repository.commit()
    repository.git("checkout", "main")
    repository.set_code("mcore-versioning", "answer = 42\n")
    repository.commit()
    repository.git("checkout", "work")
    assert plan()["packages"] == ["mcore-modules", "mcore-observe"]


def test_without_a_common_commit_everything_is_tested(
    repository: SampleRepository, plan: Plan
) -> None:
    orphan = repository.git("commit-tree", "-m", "alone", "main^{tree}").strip()
    for base in ("gone", "0" * 40, "", orphan):
        made = plan(base)
        assert made["packages"] == ALL
        assert made["reason"].startswith("everything: no ")


def test_floors_and_python_remove_cells(
    repository: SampleRepository, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    file = "packages/mcore-observe/pyproject.toml"
    repository.replace(file, '">=3.10"', '">=3.11"')
    repository.replace("packages/mcore-tensor/pyproject.toml", "torch>=2.11", "torch>=2.12")
    made = plan()
    assert cells(made, "mcore-observe") == [
        ("3.11", "2.13.0"), ("3.12", "2.13.0"), ("3.14", "2.13.0"),
    ]  # fmt: skip
    assert cells(made, "mcore-modules") == [("3.10", "2.13.0"), ("3.14", "2.13.0")]
    repository.replace(file, "torch>=2.11", "torch>=3")
    repository.commit()
    assert main(["--base", "main", "--root", str(repository.root)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no cell that mcore-observe can be installed in" in printed.err


@pytest.mark.parametrize(
    ("release", "output"),
    [
        (
            "mcore-parallel-v0.2.0",
            "package=mcore-parallel\npackages=mcore-parallel mcore-modules mcore-observe\n",
        ),
        ("mcore-observe", "package=mcore-observe\npackages=mcore-observe\n"),
        ("v0.2.0", ""),
    ],
)
def test_a_release_concerns_a_package_and_its_dependants(
    capsys: pytest.CaptureFixture[str], release: str, output: str
) -> None:
    assert main(["--release", release]) == (0 if output else 1)
    assert capsys.readouterr().out == output


def test_versions_are_read_from_hatch_toml(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    root = repository.root
    assert read_torch_pin(root) == "2.13.0"
    assert list_dev_dependencies(root) == ["numpy", "torch==2.13.0", "pytest"]
    assert read_cells(root)[-2:] == [Cell("3.12", "2.13.0"), Cell("3.14", "2.13.0")]
    assert main(["--root", str(root), "--oldest"]) == 0
    assert capsys.readouterr().out == "matrix.py3.12-2.11.0\n"
    repository.write({"hatch.toml": '[envs.default]\ndependencies = ["torch>=2.11"]\n'})
    with pytest.raises(ValueError, match="0 dependencies of the form"):
        read_torch_pin(root)
