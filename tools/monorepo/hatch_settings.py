"""What ``hatch.toml`` says about torch and the cells of the test matrix."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from monorepo.workspace import read_toml

_PIN = re.compile(r"torch==\{matrix:torch:([^}]+)\}")


class Cell(NamedTuple):
    """One combination that the packages are tested on."""

    python: str
    torch: str


def torch_pin(root: Path) -> str:
    """The version of torch in the default environment, such as ``2.13.0``."""
    pins = [found[1] for text in _default(root) if (found := _PIN.fullmatch(text))]
    if len(pins) != 1:
        raise ValueError(
            f"{root / 'hatch.toml'}: the default environment has {len(pins)} dependencies of the "
            "form torch=={matrix:torch:X}; write exactly one"
        )
    return pins[0]


def dev_dependencies(root: Path) -> tuple[str, ...]:
    """What the environment ``dev`` has, with torch at its pin."""
    pinned = f"torch=={torch_pin(root)}"
    more = read_toml(root / "hatch.toml")["envs"]["dev"]["extra-dependencies"]
    return tuple(_PIN.sub(pinned, text) for text in (*_default(root), *more))


def matrix_cells(root: Path) -> tuple[Cell, ...]:
    """The cells of the environment ``matrix``: all its tables multiplied out, oldest first."""
    tables = read_toml(root / "hatch.toml")["envs"]["matrix"]["matrix"]
    products = (itertools.product(table["python"], table["torch"]) for table in tables)
    cells = {Cell(python, torch) for product in products for python, torch in product}
    return tuple(sorted(cells, key=lambda cell: [*map(Version, cell)]))


def _default(root: Path) -> list[str]:
    dependencies: list[str] = read_toml(root / "hatch.toml")["envs"]["default"]["dependencies"]
    return dependencies
