"""The marks read from the source equal those of the running packages."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from api_check.lifecycle_marks import read_marks
from api_check.surface import read_surface
from mcore.versioning import get_deprecation, is_experimental_api, is_internal_api
from monorepo.workspace import load_workspace

WORKSPACE = load_workspace(Path(__file__).parents[3])


def _running(path: str) -> Any:
    """The object behind a public path, without calling properties."""
    owner: Any = importlib.import_module(".".join(path.split(".")[:2]))
    for name in path.split(".")[2:]:
        if isinstance(owner, ModuleType):
            owner = getattr(owner, name)
        else:
            owner = inspect.getattr_static(owner, name)
    return owner


def _functions(found: Any) -> Any:
    if isinstance(found, property):
        return found.fget
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


@pytest.mark.parametrize("name", WORKSPACE.names)
def test_every_public_name_is_marked_alike(name: str) -> None:
    package = WORKSPACE[name]
    surface = read_surface(package)
    module = importlib.import_module(package.module)
    public = {path for path in surface.entries if path.count(".") == 2}
    assert public == {f"{package.module}.{one}" for one in module.__all__ if one != "__version__"}
    compared = 0
    for path, entry in surface.entries.items():
        found = entry.found
        if found is None or (found.is_attribute and "property" not in found.labels):
            continue
        try:
            running = _functions(_running(path))
        except AttributeError:
            continue  # made by a decorator, such as the constructor of a dataclass
        marks = read_marks(found)
        internal = "internal_api" in marks.exempt
        experimental = bool({one for one in marks.exempt if one.startswith("experimental")})
        assert is_internal_api(running) == internal, path
        assert is_experimental_api(running) == experimental, path
        deprecation = get_deprecation(running)
        assert (deprecation is not None) == marks.deprecated, path
        compared += 1
    assert compared > 10
