"""The shape of source trees with one planted fault each."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from monorepo.tree import problems

Tree = Callable[..., list[str]]


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Tree:
    """Problems of a package that has the given modules."""
    name = f"sample_{re.sub(r'[^a-z]', '_', request.node.name.lower())}"

    def check(**modules: str) -> list[str]:
        for module, text in {"__init__": "", **modules}.items():
            file = tmp_path / name / f"{module.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(text.replace("HERE", name))
        found = problems({name: tmp_path})
        return [line.replace(f"{name}.", "").replace(name, "HERE") for line in found]

    return check


@pytest.mark.parametrize(
    "text",
    [
        "import HERE.b\n",
        "def f():\n    import HERE.b\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from HERE.b import x1\n",
    ],
    ids=["at the top", "in a function", "for type checkers"],
)
def test_an_import_closes_a_circle(tree: Tree, text: str) -> None:
    (found,) = tree(a=text, b="import HERE.c\n", c="from HERE.a import x1\n")
    assert "an import circle" in found
    assert all(module in found for module in "abc")


def test_two_modules_of_one_name(tree: Tree) -> None:
    modules = {"memory": "x = 1\n", "sinks__in__memory": "x = 1\n"}
    assert tree(**modules) == ["memory and sinks.memory share the name memory; rename one"]
