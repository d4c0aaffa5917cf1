"""A test's function, named so that another process can find it, with asserts rewritten."""

import ast
import builtins
import functools
import importlib
import importlib.util
import marshal
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """The names by which another process finds a module-level function."""

    module: str
    path: str | None  # None for a built-in module
    name: str
    code: bytes | None = field(default=None, repr=False)  # marshalled, if pytest rewrote asserts

    def __str__(self) -> str:
        if self.path is None:
            return f"{self.module}.{self.name}"
        return f"{os.path.relpath(self.path)}::{self.name}"


def find_target(fn: Callable[..., Any]) -> Target:
    """Return the names under which a rank finds ``fn``, a function at the top level of a module."""
    described = f"{getattr(fn, '__qualname__', None) or repr(fn)} ({type(fn).__name__})"
    if not isinstance(fn, (types.FunctionType, types.BuiltinFunctionType)):
        raise TypeError(
            f"ranks run a module-level function, got {described}; "
            "define one at the top level of the test file and pass its arguments to run_ranks"
        )
    module_name, name = fn.__module__, fn.__qualname__
    module = sys.modules.get(module_name or "")
    if "." in name or "<" in name or module is None or getattr(module, name, None) is not fn:
        raise TypeError(
            f"ranks find their function by module and name, but {described} is not "
            f"{module_name}.{name}; move it to the top level of the test file "
            "(no lambda, no function inside a function, no method)"
        )
    path = getattr(module, "__file__", None)
    if path is None and module_name not in (*sys.builtin_module_names, builtins.__name__):
        raise TypeError(
            f"{module_name}.{name} has no source file that a rank could load; put it into a file"
        )
    if path is None:
        return Target(module_name, None, name)
    path = os.path.abspath(path)
    is_rewritten = type(getattr(module, "__loader__", None)).__name__ == "AssertionRewritingHook"
    return Target(module_name, path, name, rewrite_code(path) if is_rewritten else None)


def load_target(target: Target) -> Callable[..., Any]:
    """Import the module of ``target`` and return its function.

    The module keeps its name of the test process, so classes of a test file can be pickled in both
    directions. If no import finds the module under that name, it is loaded from its file.
    """
    module = sys.modules.get(target.module)
    if module is None or not _is_from(getattr(module, "__file__", None), target.path):
        if target.path is None or (target.code is None and _can_import(target)):
            module = importlib.import_module(target.module)
        else:
            module = _load_from_file(target, target.path)
    function: Callable[..., Any] = getattr(module, target.name)
    return function


def _load_from_file(target: Target, path: str) -> types.ModuleType:
    # The main guard of a script that starts ranks must not run once more.
    name = "__mp_main__" if target.module == "__main__" else target.module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python source file that a rank could load")
    module = importlib.util.module_from_spec(spec)
    # Stand in for the packages of a dotted name that no import finds.
    parts = target.module.split(".")
    for parent in (".".join(parts[:count]) for count in range(1, len(parts))):
        if parent not in sys.modules:
            try:
                importlib.import_module(parent)
            except ImportError:
                sys.modules[parent] = types.ModuleType(parent)
    sys.modules[target.module] = module
    if target.code is None:
        spec.loader.exec_module(module)
    else:
        exec(marshal.loads(target.code), module.__dict__)
    return module


def _can_import(target: Target) -> bool:
    try:
        spec = importlib.util.find_spec(target.module)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_from(spec.origin, target.path)


def _is_from(found: str | None, wanted: str | None) -> bool:
    if found is None or wanted is None:
        return wanted is None
    return os.path.realpath(found) == os.path.realpath(wanted)


@functools.cache
def rewrite_code(file: str) -> bytes | None:
    """Return the marshalled code of ``file`` with pytest's assert statements, read once.

    None if this pytest offers no rewriting or the file is not valid Python. Then an ordinary import
    works, or raises the error.
    """
    try:
        from _pytest.assertion import rewrite

        source = Path(file).read_bytes()
        tree = ast.parse(source, filename=file)
        rewrite.rewrite_asserts(tree, source, file)
        return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError):
        return None
