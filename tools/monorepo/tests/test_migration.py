from pathlib import Path

import pytest

from monorepo.migration import PAGE, problems
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

CODE = '__all__ = ["f", "g"]\nfrom mcore.tensor.inner import f\ndef g(): ...\n'
INNER = (
    "def f(): ...\n_state = 1\n"
    'def __getattr__(name):\n    if name == "_made":\n        return 1\n    raise AttributeError\n'
)
UTILS, MODULE = "`megatron.core.utils`", "`megatron.core.transformer.module`"
ROWS = f"""# Sample

| name | was imported from | is imported from | an absent group now means |
| --- | --- | --- | --- |
| `f` | {UTILS}, {MODULE} | `mcore.tensor` | one rank |
| `_made` | {UTILS} | `mcore.tensor.inner` | |
| `_state` | {UTILS} | `mcore.tensor.inner` | |
"""


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path / "repository")
    repository.add_package("mcore-tensor", code=CODE)
    repository.add_package("mcore-versioning", code="")
    repository.write({"packages/mcore-tensor/src/mcore/tensor/inner.py": INNER, PAGE: ROWS})
    return repository


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"| `h` | {UTILS} | `mcore.tensor` |", "h is not in __all__ of mcore.tensor"),
        (f"| `_h` | {UTILS} | `mcore.tensor.inner` |", "_h is not defined in mcore.tensor.inner"),
        (f"| `f` | {UTILS} | `mcore.tensor.inner` |", "f is public and has to be imported from mc"),
        (f"| `k` | {UTILS} | `mcore.tensor.inner` |", "k is not in __all__ of mcore.tensor"),
        (f"| `f` | {UTILS} | `mcore.nothing` |", "f: mcore.nothing is not part of a package here"),
        (f"| `g` | {UTILS} |", "has to begin with `NAME`"),
        ("| `g` | `megatron.core.lost` | `mcore.tensor` |", "has to begin with `NAME`"),
        (f"| `f` | {MODULE} | `mcore.tensor` |", "mcore.tensor.f is there twice"),
    ],
)
def test_a_wrong_row_is_named(repository: SampleRepository, row: str, message: str) -> None:
    assert list(problems(load_workspace(repository.root))) == []
    repository.write({PAGE: f"{ROWS}{row}\n"})
    [line] = problems(load_workspace(repository.root))
    assert message in line


def test_a_name_that_left_all_is_named(repository: SampleRepository) -> None:
    repository.set_code("mcore-tensor", CODE.replace('"f", ', ""))
    found = list(problems(load_workspace(repository.root)))
    assert found == ["f is not in __all__ of mcore.tensor"]
