"""The versions of Python and torch that ``hatch.toml`` names."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from monorepo.workspace import read_toml

_PIN = re.compile(r"torch==\{matrix:torch:([^}]+)\}")


class Cell(NamedTuple):
    """One combination that the packages are tested on."""

    python: str
    torch: str


def read_torch_pin(root: Path) -> str:
    """The version of torch in the default environment, such as ``2.13.0``."""
    default = read_toml(root / "hatch.toml")["envs"]["default"]["dependencies"]
    pins = [found[1] for text in default if (found := _PIN.fullmatch(text))]
    if len(pins) != 1:
        raise ValueError(
            f"{root / 'hatch.toml'}: the default environment has {len(pins)} dependencies of the "
            "form torch=={matrix:torch:X}; write exactly one"
        )
    return str(pins[0])


def list_dev_dependencies(root: Path) -> list[str]:
    """The dependencies of the environment ``dev``, with torch at its pin."""
    pinned = f"torch=={read_torch_pin(root)}"
    environments = read_toml(root / "hatch.toml")["envs"]
    more = environments["dev"]["extra-dependencies"]
    return [_PIN.sub(pinned, text) for text in (*environments["default"]["dependencies"], *more)]


def read_cells(root: Path) -> list[Cell]:
    """The cells of the environment ``matrix``: the products of its tables, oldest first."""
    tables = read_toml(root / "hatch.toml")["envs"]["matrix"]["matrix"]
    cells = {Cell(*pair) for one in tables for pair in product(one["python"], one["torch"])}
    return sorted(cells, key=lambda cell: [*map(Version, cell)])
