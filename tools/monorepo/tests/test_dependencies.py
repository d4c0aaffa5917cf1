"""Tests of comparing declared dependencies with imports."""

from pathlib import Path

import pytest

from monorepo.dependencies import disagreements, provided_by
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base")
    made.add_package("mcore-middle", needs=("mcore-base>=0.1",), code="import mcore.base\n")
    made.add_package("mcore-top", needs=("mcore-middle>=0.1",), code="import mcore.middle\n")
    return made


def found(repository: SampleRepository, package: str) -> list[str]:
    workspace = load_workspace(repository.root)
    return list(disagreements(workspace, workspace[package]))


def declare(repository: SampleRepository, text: str) -> None:
    file = "packages/mcore-top/pyproject.toml"
    repository.write({file: repository.read(file) + text})


def test_agreement_is_silent(repository: SampleRepository) -> None:
    assert found(repository, "mcore-top") == []


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
    (line,) = found(repository, "mcore-top")
    assert line.startswith("packages/mcore-top/src/mcore/top/__init__.py:")
    assert line.endswith("needs numpy, which is not declared")


def test_tests_import_what_their_group_brings(repository: SampleRepository) -> None:
    folder = "packages/mcore-top/tests"
    repository.write(
        {f"{folder}/helper.py": "", f"{folder}/test_top.py": "import helper, pytest\n"}
    )
    assert found(repository, "mcore-top") == []
    undeclared = "import rank_testing\nimport numpy as np\ndef test(): import torch\n"
    repository.write({f"{folder}/test_other.py": undeclared})
    (problem,) = found(repository, "mcore-top")
    assert problem == (
        f"{folder}/test_other.py:2: numpy needs numpy, which the dependency group test does not "
        "bring"
    )
    file = "packages/mcore-top/pyproject.toml"
    repository.write({file: repository.read(file).replace('["pytest', '["numpy", "pytest')})
    assert found(repository, "mcore-top") == []


def test_stubs_of_the_type_checker_are_for_type_checkers_only(
    repository: SampleRepository,
) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import _typeshed\n"
    repository.set_code("mcore-top", "import mcore.middle\n" + typed)
    assert found(repository, "mcore-top") == []
    repository.set_code("mcore-top", "import mcore.middle\nfrom _typeshed import ReadableBuffer\n")
    assert "_typeshed.ReadableBuffer needs" in found(repository, "mcore-top")[0]


def test_sibling_that_comes_only_through_another_is_undeclared(
    repository: SampleRepository,
) -> None:
    repository.set_code("mcore-top", "from mcore.middle import x\nfrom mcore.base import y\n")
    (problem,) = found(repository, "mcore-top")
    assert problem.endswith(":2: mcore.base.y needs mcore-base, which is not declared")


def test_dependency_that_nothing_imports_is_named(repository: SampleRepository) -> None:
    repository.set_code("mcore-top", "import json\nimport mcore.top\n")
    assert found(repository, "mcore-top") == [
        "packages/mcore-top/pyproject.toml: mcore-middle is declared, but nothing imports it"
    ]


def test_extra_that_nothing_imports_is_named(repository: SampleRepository) -> None:
    declare(repository, '\n[project.optional-dependencies]\nfast = ["numpy>=2"]\n')
    assert found(repository, "mcore-top") == [
        "packages/mcore-top/pyproject.toml: numpy is declared by extra fast, but nothing imports it"
    ]


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("def late():\n    import numpy\n", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n", True),
        ("try:\n    import numpy\nexcept ImportError:\n    numpy = None\n", False),
        ("require_extra('fast', 'it')\nimport numpy\n", True),
        ("require_extra('other', 'it')\nimport numpy\n", False),
    ],
)
def test_library_of_an_extra_is_imported_late(
    repository: SampleRepository, code: str, allowed: bool
) -> None:
    declare(repository, '\n[project.optional-dependencies]\nfast = ["numpy>=2"]\n')
    repository.set_code("mcore-top", "import mcore.middle\n" + code)
    problems = found(repository, "mcore-top")
    assert ["belongs to extra fast" in problem for problem in problems] == (
        [] if allowed else [True]
    )


def test_module_that_no_index_has_is_declared_by_name(repository: SampleRepository) -> None:
    declare(repository, '\n[tool.monorepo]\nnot-on-an-index = ["own_kernels"]\n')
    (problem,) = found(repository, "mcore-top")
    assert problem.endswith("own-kernels is declared by not-on-an-index, but nothing imports it")
    repository.set_code("mcore-top", "import mcore.middle\ndef late():\n    import own_kernels\n")
    assert found(repository, "mcore-top") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("json.decoder", []),
        ("annotationlib.Format", []),
        ("mcore.tensor.buffers", []),
        ("mcore.versioning", [{"mcore-versioning"}]),
        ("torch.nn", [{"torch"}]),
        ("torch.utils.tensorboard.SummaryWriter", [{"torch"}, {"tensorboard"}]),
        ("pynvml", [{"nvidia-ml-py"}]),
        ("some_library.part", [{"some-library"}]),
    ],
)
def test_names_lead_to_the_distributions_that_provide_them(
    name: str, expected: list[set[str]]
) -> None:
    workspace = load_workspace(REPOSITORY)
    assert provided_by(workspace, workspace["mcore-tensor"], name) == expected
