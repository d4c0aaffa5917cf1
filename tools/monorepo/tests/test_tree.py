"""The shape of source trees with one planted fault each."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from monorepo.tree import Root, code_lines, problems

LONG = "\n".join(f"x{number} = {number}" for number in range(40)) + "\n"

Tree = Callable[..., list[str]]


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Tree:
    """Problems of a package that has the given modules."""
    name = f"sample_{re.sub(r'[^a-z]', '_', request.node.name.lower())}"

    def check(*public: str, **modules: str) -> list[str]:
        for module, text in {"__init__": "", **modules}.items():
            file = tmp_path / name / f"{module.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(text.replace("HERE", name))
        root = Root(tmp_path, {f"{name}.{each}" for each in public})
        found = problems({name: root})
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
    (found,) = tree(a=text + LONG, b=f"import HERE.c\n{LONG}", c=f"from HERE.a import x1\n{LONG}")
    assert "an import circle" in found
    assert all(module in found for module in "abc")


def test_a_small_module_with_one_importer(tree: Tree) -> None:
    modules = {"a": f"import HERE.b\n{LONG}", "b": "x = 1\n"}
    assert tree(**modules) == ["b: 1 lines of code for a alone; merge it into that"]
    assert tree("b", **modules) == []  # users import it by name


@pytest.mark.parametrize(
    "modules",
    [
        {"a": f"import HERE.b\n{LONG}", "b": LONG},
        {"a": f"import HERE.b\n{LONG}", "c": f"import HERE.b\n{LONG}", "b": "x = 1\n"},
        {"__init__": "from HERE.b import x\n", "b": "x = 1\n"},
        {"b": "x = 1\n"},
    ],
    ids=["forty lines", "two importers", "front door", "a command"],
)
def test_modules_worth_their_door(tree: Tree, modules: dict[str, str]) -> None:
    assert tree(**modules) == []


def test_two_modules_of_one_name(tree: Tree) -> None:
    modules = {"memory": LONG, "sinks__in__memory": LONG}
    assert tree(**modules) == ["memory and sinks.memory share the name memory; rename one"]


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    text = '"""One.\n\nTwo.\n"""\n\n# no\nx = (\n    1\n)\n\n\n'
    text += 'def f():\n    """Doc."""\n    return "a\\n"\n'
    assert code_lines(text) == 4
