"""A rank finds the function of a test by file, module name and name."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rank_testing import run_ranks
from rank_testing.target import Target, find_target, load_target

SOURCE = """
def where():
    return __name__, __file__, where.__module__

if __name__ == "__main__":
    raise SystemExit("the script ran again")
"""


def load_and_call(target: Target) -> Any:
    return load_target(target)()


def has_parents(target: Target) -> bool:
    load_target(target)
    parts = target.module.split(".")
    return all(".".join(parts[:count]) in sys.modules for count in range(1, len(parts) + 1))


def test_a_function_of_this_file_is_found_by_its_names() -> None:
    target = find_target(load_and_call)
    assert target == Target(__name__, os.path.abspath(__file__), "load_and_call", target.code)
    assert str(target) == f"{os.path.relpath(__file__)}::load_and_call"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("no-such-package.tests.test_where", "no-such-package.tests.test_where"),
        ("json", "json"),  # not the module of that name
        ("__main__", "__mp_main__"),  # and the script does not run a second time
    ],
)
def test_a_file_that_no_import_finds_is_loaded_under_its_name(
    tmp_path: Path, module: str, name: str
) -> None:
    path = tmp_path / "test_where.py"
    path.write_text(SOURCE)
    target = Target(module, str(path), "where")
    assert run_ranks(load_and_call, 1, target, init=None) == [(name, str(path), name)]
    assert all(run_ranks(has_parents, 1, target, init=None))


def test_an_importable_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rank_testing_example"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'package'\n")
    (package / "inner.py").write_text("from . import NAME\ndef name():\n    return NAME\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target("rank_testing_example.inner", str(package / "inner.py"), "name")
    assert run_ranks(load_and_call, 1, target, init=None) == ["package"]


def test_a_function_without_a_file_is_refused() -> None:
    module = types.ModuleType("rank_testing_typed_in")
    exec("def typed_in(): pass", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(TypeError, match="no source file"):
            find_target(module.typed_in)
    finally:
        del sys.modules[module.__name__]
