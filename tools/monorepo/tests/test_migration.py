from pathlib import Path

import pytest

from monorepo.migration import (
    BEGIN,
    END,
    PAGE,
    SOURCE,
    MigrationError,
    main,
    problems,
    read_moves,
    table,
    with_table,
)
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


def _run(repository: SampleRepository, *arguments: str) -> int:
    names = str(repository.root / "names.tsv")
    return main(["--root", str(repository.root), "--names", names, *arguments])


def test_the_table_of_this_repository_is_fresh_and_its_names_are_there() -> None:
    assert main(["--check"]) == 0


def test_the_old_modules_are_the_four_of_megatron() -> None:
    assert {old for move in read_moves(SOURCE) for old in move.old} == {
        "megatron.core.utils",
        "megatron.core.transformer.module",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
        "megatron.bridge.training.utils.train_utils",
    }


def test_the_table_is_written_between_the_markers(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(repository, "--check") == 1
    assert "stale" in capsys.readouterr().err
    assert _run(repository) == 0
    assert repository.read(PAGE) == (
        f"# Sample\n\n{BEGIN}\n\n"
        "<details>\n<summary><code>mcore.tensor</code>: 3 names</summary>\n\n"
        "| name | was imported from | is imported from | an absent group now means |\n"
        "| --- | --- | --- | --- |\n"
        "| `f` | `old.a`, `old.b` | `mcore.tensor` | one rank |\n"
        "| `_made` | `old.a` | `mcore.tensor.inner` | |\n"
        "| `_state` | `old.a` | `mcore.tensor.inner` | |\n\n"
        f"</details>\n\n{END}\n\nThe end.\n"
    )
    assert _run(repository, "--check") == 0


def test_a_row_that_is_missing_in_the_readme_makes_it_stale(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(repository)
    repository.write({"names.tsv": f"{NAMES}g\told.a\tmcore.tensor\t-\n"})
    assert _run(repository, "--check") == 1
    assert "stale; run: hatch run migration" in capsys.readouterr().err


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
def test_a_wrong_row_fails_and_writes_nothing(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str], row: str, message: str
) -> None:
    repository.write({"names.tsv": f"{NAMES}{row}\n"})
    before = repository.files()
    assert _run(repository) == 1
    assert message in capsys.readouterr().err
    assert repository.files() == before


def test_a_name_that_left_all_fails(repository: SampleRepository) -> None:
    moves = read_moves(repository.root / "names.tsv")
    assert problems(moves, load_workspace(repository.root)) == []
    repository.set_code("mcore-tensor", CODE.replace('"f", ', ""))
    found = problems(moves, load_workspace(repository.root))
    assert found == ["f is not in __all__ of mcore.tensor"]


def test_packages_without_groups_have_three_columns(repository: SampleRepository) -> None:
    moves = [move for move in read_moves(repository.root / "names.tsv") if move.name != "f"]
    assert "an absent group" not in table(moves, ["mcore.tensor"])


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(MigrationError, match="needs one line"):
        with_table("# Sample\n", "text")
