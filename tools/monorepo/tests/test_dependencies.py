"""Declared dependencies compared with imports."""

import shutil
from pathlib import Path

import pytest

from monorepo.dependencies import check_package, find_imports, find_providers
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base")
    made.add_package("mcore-middle", needs=("mcore-base>=0.1",), code="import mcore.base\n")
    made.add_package("mcore-top", needs=("mcore-middle>=0.1",), code="import mcore.middle\n")
    return made


def find(repository: SampleRepository, package: str) -> list[str]:
    workspace = load_workspace(repository.root)
    return list(check_package(workspace, workspace[package]))


@pytest.mark.parametrize(
    "code",
    [
        "import numpy\n",
        "def late():\n    from numpy import array\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy.typing\n",
        "import importlib\ndef late():\n    importlib.import_module('numpy')\n",
    ],
)
def test_undeclared_import_is_named(repository: SampleRepository, code: str) -> None:
    repository.set_code("mcore-top", "import mcore.middle\n" + code)
    (line,) = find(repository, "mcore-top")
    assert line.startswith("packages/mcore-top/src/mcore/top/__init__.py:")
    assert line.endswith("needs numpy, which is not declared")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from mcore.middle import x\nfrom mcore.base import y\n",
            "src/mcore/top/__init__.py:2: mcore.base.y needs mcore-base, which is not declared",
        ),
        (
            "import json\nimport mcore.top\n",
            "pyproject.toml: mcore-middle is declared, but nothing imports it",
        ),
    ],
)
def test_siblings_are_declared_and_imported(
    repository: SampleRepository, code: str, expected: str
) -> None:
    repository.set_code("mcore-top", code)
    assert find(repository, "mcore-top") == [f"packages/mcore-top/{expected}"]


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("", None),
        ("def late():\n    import numpy\n", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n", True),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None\n", False),
        ("require_extra('fast', 'it')\nimport numpy\n", True),
        ("require_extra('other', 'it')\nimport numpy\n", False),
    ],
)
def test_library_of_an_extra_is_imported_late(
    repository: SampleRepository, code: str, allowed: bool | None
) -> None:
    extra = '[project.optional-dependencies]\nfast = ["numpy>=2"]\n\n[dependency-groups]'
    repository.replace("packages/mcore-top/pyproject.toml", "[dependency-groups]", extra)
    repository.set_code("mcore-top", "import mcore.middle\n" + code)
    problems = find(repository, "mcore-top")
    assert len(problems) == (not allowed)
    assert not problems or (
        "belongs to extra fast and is imported when the module" in problems[0]
        or "numpy is declared by extra fast, but nothing imports it" in problems[0]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("annotationlib.Format", []),
        ("fused_weight_gradient_mlp_cuda", []),
        ("mcore.tensor.buffers", []),
        ("mcore.versioning", [{"mcore-versioning"}]),
        ("torch.utils.tensorboard.SummaryWriter", [{"torch"}, {"tensorboard"}]),
        ("pynvml", [{"nvidia-ml-py"}]),
        ("some_library.part", [{"some-library"}]),
    ],
)
def test_names_lead_to_the_distributions_that_provide_them(
    name: str, expected: list[set[str]]
) -> None:
    workspace = load_workspace(REPOSITORY)
    assert find_providers(workspace, workspace["mcore-tensor"], name) == expected


def test_every_kind_of_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    shutil.copy(Path(__file__).with_name("sample_imports.txt"), tmp_path / "package/module.py")
    standard = ("importlib", "typing", "typing.TYPE_CHECKING")
    found = [one for one in find_imports(tmp_path) if one.name not in standard]
    early = {"a.b", "c", "e.f.g", "e.f.h", "k", "n", "default", "s"}
    assert {one.name for one in found if not one.late} == early
    assert {one.name for one in found if one.late} == {*"ijqrtu", "l.m", "o.p"}
    assert next(one.line for one in found if one.name == "q") == 22
