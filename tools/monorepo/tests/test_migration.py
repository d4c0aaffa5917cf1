from pathlib import Path

import pytest

from monorepo.migration import BEGIN, END, PAGE, SOURCE, fresh_page, problems, read_moves
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

CODE = '__all__ = ["f", "g"]\nfrom mcore.tensor.inner import f\ndef g(): ...\n'
INNER = (
    "def f(): ...\n_state = 1\n"
    'def __getattr__(name):\n    if name == "_made":\n        return 1\n    raise AttributeError\n'
)
NAMES = (
    "# name\told\tnew\tgroup\n"
    "f\told.a, old.b\tmcore.tensor\tone rank\n"
    "_state\told.a\tmcore.tensor.inner\t-\n"
    "_made\told.a\tmcore.tensor.inner\t-\n"
)


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    repository = SampleRepository(tmp_path / "repository")
    repository.add_package("mcore-tensor", code=CODE)
    repository.add_package("mcore-versioning", code="")
    repository.write({"packages/mcore-tensor/src/mcore/tensor/inner.py": INNER})
    repository.write({PAGE: f"# Sample\n\n{BEGIN}\n{END}\n\nThe end.\n"})
    repository.write({"names.tsv": NAMES})
    return repository


def test_the_old_modules_are_the_four_of_megatron() -> None:
    assert {old for move in read_moves(SOURCE) for old in move.old} == {
        "megatron.core.utils",
        "megatron.core.transformer.module",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
        "megatron.bridge.training.utils.train_utils",
    }


def test_the_table_is_written_between_the_markers(repository: SampleRepository) -> None:
    page = _page(repository)
    assert page == (
        f"# Sample\n\n{BEGIN}\n\n"
        "<details>\n<summary><code>mcore.tensor</code>: 3 names</summary>\n\n"
        "| name | was imported from | is imported from | an absent group now means |\n"
        "| --- | --- | --- | --- |\n"
        "| `f` | `old.a`, `old.b` | `mcore.tensor` | one rank |\n"
        "| `_made` | `old.a` | `mcore.tensor.inner` | |\n"
        "| `_state` | `old.a` | `mcore.tensor.inner` | |\n\n"
        f"</details>\n\n{END}\n\nThe end.\n"
    )
    assert _problems(repository) == [f"the table in {PAGE} is stale; run: hatch run migration"]
    repository.write({PAGE: page})
    assert _problems(repository) == []
    repository.write({"names.tsv": NAMES.replace("one rank", "-")})
    assert "an absent group" not in _page(repository)
    repository.write({PAGE: "# Sample\n"})
    assert "needs one line" in _problems(repository)[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h\told.a\tmcore.tensor\t-", "h is not in __all__ of mcore.tensor"),
        ("_h\told.a\tmcore.tensor.inner\t-", "_h is not defined in mcore.tensor.inner"),
        ("f\told.a\tmcore.tensor.inner\t-", "f is public and has to be imported from mcore.tensor"),
        ("k\told.a\tmcore.tensor.inner\t-", "k is not in __all__ of mcore.tensor"),
        ("f\told.a\tmcore.nothing\t-", "f: mcore.nothing is not part of a package here"),
        ("f\told.a\tmcore.tensor", "names.tsv:5 needs four columns"),
        ("f\told.c\tmcore.tensor\t-", "lists mcore.tensor.f twice"),
    ],
)
def test_a_wrong_row_is_named(repository: SampleRepository, row: str, message: str) -> None:
    repository.write({"names.tsv": f"{NAMES}{row}\n"})
    assert message in _problems(repository)[0]


def test_a_name_that_left_all_fails(repository: SampleRepository) -> None:
    repository.write({PAGE: _page(repository)})
    repository.set_code("mcore-tensor", CODE.replace('"f", ', ""))
    assert _problems(repository) == ["f is not in __all__ of mcore.tensor"]


def _page(repository: SampleRepository) -> str:
    return fresh_page(load_workspace(repository.root), repository.root / "names.tsv")


def _problems(repository: SampleRepository) -> list[str]:
    return list(problems(load_workspace(repository.root), repository.root / "names.tsv"))
