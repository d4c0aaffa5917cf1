"""Tests of reading torch's pin and the cells of the matrix."""

from pathlib import Path

import pytest

from monorepo.hatch_settings import Cell, dev_dependencies, matrix_cells, torch_pin

_SETTINGS = """
[envs.default]
dependencies = ["numpy", "torch=={matrix:torch:2.13.0}"]
[envs.dev]
extra-dependencies = ["pytest"]
[[envs.matrix.matrix]]
python = ["3.10", "3.9"]
torch = ["2.11.0", "2.9.1"]
[[envs.matrix.matrix]]
python = ["3.14"]
torch = ["2.11.0"]
"""


def test_cells_are_the_tables_products_oldest_first(tmp_path: Path) -> None:
    (tmp_path / "hatch.toml").write_text(_SETTINGS)
    assert [(cell.python, cell.torch) for cell in matrix_cells(tmp_path)] == [
        ("3.9", "2.9.1"),
        ("3.9", "2.11.0"),
        ("3.10", "2.9.1"),
        ("3.10", "2.11.0"),
        ("3.14", "2.11.0"),
    ]


def test_cell_of_two_tables_is_one(tmp_path: Path) -> None:
    table = '[[envs.matrix.matrix]]\npython = ["3.10"]\ntorch = ["2.11.0"]\n'
    (tmp_path / "hatch.toml").write_text(table * 2)
    assert matrix_cells(tmp_path) == (Cell("3.10", "2.11.0"),)


def test_pin_is_the_default_of_the_matrix_field(tmp_path: Path) -> None:
    (tmp_path / "hatch.toml").write_text(_SETTINGS)
    assert torch_pin(tmp_path) == "2.13.0"


def test_dev_dependencies_have_torch_at_its_pin(tmp_path: Path) -> None:
    (tmp_path / "hatch.toml").write_text(_SETTINGS)
    assert dev_dependencies(tmp_path) == ("numpy", "torch==2.13.0", "pytest")


def test_missing_pin_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hatch.toml").write_text('[envs.default]\ndependencies = ["torch>=2.11"]\n')
    with pytest.raises(ValueError, match="0 dependencies of the form"):
        torch_pin(tmp_path)


def test_own_matrix_holds_the_pin() -> None:
    root = Path(__file__).parents[3]
    assert torch_pin(root) in {cell.torch for cell in matrix_cells(root)}
