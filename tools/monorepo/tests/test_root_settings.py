"""The settings of tools in the root pyproject.toml name every package and every tool."""

import re
from pathlib import Path
from typing import Any

import pytest

from monorepo.workspace import PACKAGES_FOLDER, load_workspace, read_toml

ROOT = Path(__file__).parents[3]
WORKSPACE = load_workspace(ROOT)
MODULES = {one.module for one in WORKSPACE.distributions.values()}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The tool tables of the root's ``pyproject.toml``."""
    table = read_toml(ROOT / "pyproject.toml")
    assert set(table) == {"tool"}
    tools: dict[str, Any] = table["tool"]
    return tools


def test_import_rules_hold_every_package(settings: dict[str, Any]) -> None:
    assert set(settings["importlinter"]["root_packages"]) == MODULES
    layers, _ = settings["importlinter"]["contracts"]
    assert set(re.split(r"[ |]+", " ".join(layers["layers"]))) == MODULES


def test_test_runner_and_linter_look_everywhere(settings: dict[str, Any]) -> None:
    assert set(settings["pytest"]["ini_options"]["testpaths"]) == {
        PACKAGES_FOLDER, "tools", "tests-integration",
    }  # fmt: skip
    sources = {one.source.relative_to(ROOT) for one in WORKSPACE.distributions.values()}
    found = {path.relative_to(ROOT) for glob in settings["ruff"]["src"] for path in ROOT.glob(glob)}
    assert found == {*sources, Path("tools"), Path("tools/migrate")}
