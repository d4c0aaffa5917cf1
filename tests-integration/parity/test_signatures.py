"""The column of releases in the migration page, against the installed Megatron, name by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest

from mcore_migrate.table import Home, read_table

DISTRIBUTIONS = {"core": "megatron-core", "fsdp": "megatron-fsdp"}
RANGE = re.compile(r"(by keyword )?(core|fsdp) 0\.(\d+)(?: to 0\.(\d+))?")
HOMES = read_table().homes
COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Their names for the first argument of ours. The page of differences lists those refused here.
OTHER_NAMES = {
    "is_te_min_version": {"vers": "version"},
    "log_single_rank": {"logger_": "logger"},
}
ABSENT = object()


def find_kind(path: str) -> str:
    return "core" if path.startswith("megatron.core.") else "fsdp"


def find_release(path: str, home: Home) -> str | None:
    """Return "", "by keyword ", or None if the page leaves out the installed release."""
    kind = find_kind(path)
    installed = int(version(DISTRIBUTIONS[kind]).split(".")[1])
    for by_keyword, of, first, last in RANGE.findall(home.releases):
        if of == kind and int(first) <= installed <= int(last or first):
            return str(by_keyword)
    return None


def load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name, ABSENT)


def list_pairs(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a function, or the constructor and the public methods of a class."""
    if not inspect.isclass(theirs):
        if callable(theirs):
            yield "", ours, theirs
        return
    yield "", ours.__init__, theirs.__init__
    for name, method in vars(theirs).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield f".{name}", getattr(ours, name, None), method


def compare(ours: Callable[..., Any] | None, theirs: Any, by_keyword: bool) -> Iterator[str]:
    """Yield what a call that works with theirs would meet."""
    if ours is None:
        yield "is missing"
        return
    mine, wanted = (inspect.signature(one).parameters for one in (ours, theirs))
    other_names = OTHER_NAMES.get(getattr(ours, "__name__", ""), {})
    wanted = {other_names.get(name, name): one for name, one in wanted.items()}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in mine.values())
    for place, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind in COLLECTING:
            continue
        found = mine.get(name)
        if found is None:
            if not takes_any:
                yield f"has no parameter {name}"
            continue
        is_positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        if is_positional and not by_keyword and list(mine).index(name) != place:
            yield f"has {name} in another position"
        if parameter.default is not parameter.empty and found.default != parameter.default:
            yield f"has {name}={found.default!r}, not {parameter.default!r}"
    for name, parameter in mine.items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in COLLECTING
        if is_needed and name not in wanted:
            yield f"needs {name}"


def differences(path: str, home: Home, by_keyword: bool) -> list[str]:
    ours, theirs = load(f"{home.module}.{home.name}"), load(path)
    return [
        f"{home.name}{name} {text}"
        for name, mine, other in list_pairs(ours, theirs)
        for text in compare(mine, other, by_keyword)
    ]


@pytest.mark.parametrize("path", sorted(one for one in HOMES if "bridge" not in one))
def test_a_name_has_their_arguments_in_the_releases_of_the_page(path: str) -> None:
    home = HOMES[path]
    release = find_release(path, home)
    paths = [one for one, other in HOMES.items() if other == home and find_kind(one) == "core"]
    if load(path) is ABSENT:  # in another module of the row, or in no release of this kind
        assert release is None or any(load(one) is not ABSENT for one in paths)
    elif release is not None:
        assert differences(path, home, bool(release)) == []
        assert not release or differences(path, home, by_keyword=False)
    else:
        assert find_kind(path) not in home.releases or differences(path, home, by_keyword=False)
