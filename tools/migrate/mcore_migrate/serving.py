"""Serves the names of mcore under Megatron's modules, in a process that imports Megatron."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .table import Home, read_table

# Their results differ on purpose. They are served only by name.
DIFFERENT = {
    "local_multi_tensor_applier": "its functions below are Megatron's as well",
    "local_multi_tensor_l2_norm": "the norm is exact, so clipping differs in the last bit",
    "local_multi_tensor_scale": "it multiplies in float32, so clipping differs in the last bit",
    "StragglerDetector": "its controller changes with POST only and listens on loopback",
    "__straggler__": "its controller changes with POST only and listens on loopback",
    "training_log": "throughput counts every step, and losses below zero or NaN are in the line",
}
_BUILDERS = ("make_sharded_tensor_for_checkpoint", "make_tp_sharded_tensor_for_checkpoint")
_STATE, _FLAGS = "megatron.core.parallel_state", "megatron.core.config"


@dataclass(frozen=True)
class Served:
    """A name of a module of Megatron, and why it is mcore's or not.

    Attributes:
        module: The module of Megatron.
        name: The name in it.
        source: ``"mcore"`` or ``"megatron"``. Empty as long as the module is not imported.
        reason: Why it is not mcore's.
    """

    module: str
    name: str
    source: str
    reason: str = ""


class Serving:
    """An import hook that puts mcore's names into Megatron's modules after they have run.

    This happens at the first import of a module, before others copy names from it. Names of
    packages that are not installed stay Megatron's. After ``initialize_model_parallel`` its groups
    are the default ``ProcessGroups``, and the experimental flag of Megatron sets mcore's.

    Args:
        only: The names to serve. None means all but the names in ``DIFFERENT``.
        exclude: Names to leave.

    Raises:
        ValueError: A name is not on the migration page.
        RuntimeError: A module of Megatron with such a name was imported before.
    """

    def __init__(self, only: Collection[str] | None = None, exclude: Collection[str] = ()) -> None:
        self.only, self.exclude = only, exclude
        self._homes: dict[str, dict[str, Home]] = {}
        for path, home in read_table().homes.items():
            module, _, name = path.rpartition(".")
            self._homes.setdefault(module, {})[name] = home
        known = {name for names in self._homes.values() for name in names}
        if unknown := sorted({*(only or ()), *exclude} - known):
            raise ValueError(f"not on the migration page: {', '.join(unknown)}")
        if early := sorted({*self._homes, _STATE, _FLAGS} & sys.modules.keys()):
            raise RuntimeError(
                f"{', '.join(early)} was imported before, and others may have its names. Import "
                "mcore_megatron first, or start the program with python -m mcore_megatron"
            )
        self.rows: dict[tuple[str, str], Served] = {}
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        self._classes: dict[type, type] = {}
        self._finder = _Finder({*self._homes, _STATE, _FLAGS}, self._patch)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Put Megatron's names back. Copies that other modules made stay mcore's."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for module, name, value in reversed(self._replaced):
            setattr(module, name, value)
        self._replaced.clear()

    def report(self) -> list[Served]:
        """List every name of the migration page, in the order of the page."""
        return [
            self.rows.get((module, name), Served(module, name, "", "its module is not imported"))
            for module, names in self._homes.items()
            for name in names
        ]

    def _patch(self, module: ModuleType) -> None:
        """Replace the names of a module that has just run."""
        if module.__name__ == _STATE and _is_found("mcore.parallel"):
            self._wrap(module, "initialize_model_parallel", after=_set_default_groups)
            self._wrap(module, "destroy_model_parallel", after=_clear_default_groups)
        elif module.__name__ == _FLAGS and _is_found("mcore.versioning"):
            self._wrap(module, "set_experimental_flag", after=_set_experimental_flag)
        for name, home in self._homes.get(module.__name__, {}).items():
            reason = self._find_reason_to_leave(module, home)
            if not reason:
                try:
                    ours = getattr(importlib.import_module(home.module), name)
                except ImportError as error:
                    reason = f"{home.package} is not installed or cannot be imported: {error}"
                else:
                    reason = _compare_order(getattr(module, name), ours)
            if not reason:
                self._replace(module, name, self._adapt(name, ours))
            source = "megatron" if reason else "mcore"
            self.rows[module.__name__, name] = Served(module.__name__, name, source, reason)

    def _find_reason_to_leave(self, module: ModuleType, home: Home) -> str:
        if home.name in self.exclude or (self.only is not None and home.name not in self.only):
            return "the options leave it"
        if self.only is None and home.name in DIFFERENT:
            return DIFFERENT[home.name]
        if not hasattr(module, home.name):
            return "this release does not have it"
        return ""

    def _replace(self, module: ModuleType, name: str, value: Any) -> None:
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def _wrap(self, module: ModuleType, name: str, *, after: Callable[..., None]) -> None:
        """Make a function of Megatron call another one after it."""
        theirs = getattr(module, name, None)
        if theirs is None:
            return

        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = theirs(*args, **kwargs)
            after(*args, **kwargs)
            return result

        self._replace(module, name, call)

    def _adapt(self, name: str, ours: Any) -> Any:
        """The object itself, or its form with the sharded entries of Megatron's checkpoints."""
        if name in _BUILDERS:
            return _convert_result(ours)
        if isinstance(ours, type) and hasattr(ours, "sharded_state_dict"):
            return self._serve_class(ours)
        return ours

    def _serve_class(self, ours: type) -> type:
        """A subclass with Megatron's entries in its sharded state dict.

        It also derives from the served classes of its bases, so ``isinstance`` holds among them.
        """
        if ours not in self._classes:
            bases = [
                self._serve_class(base)
                for base in ours.__mro__[1:]
                if "sharded_state_dict" in vars(base)
            ]
            body = {
                "__module__": ours.__module__,
                "__qualname__": ours.__qualname__,
                "__doc__": ours.__doc__,
                "sharded_state_dict": _convert_result(vars(ours)["sharded_state_dict"])
                if "sharded_state_dict" in vars(ours)
                else _convert_result(ours.sharded_state_dict),  # type: ignore[attr-defined]
            }
            self._classes[ours] = type(ours)(ours.__name__, (ours, *bases), body)
        return self._classes[ours]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and has their loaders patch them at the end."""

    def __init__(self, names: Collection[str], patch: Callable[[ModuleType], None]) -> None:
        self._names, self._patch = names, patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            loader: Any = spec and spec.loader
            if loader:
                loader.exec_module = functools.partial(self._execute, loader.exec_module)
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._patch(module)


def _compare_order(theirs: Any, ours: Any) -> str:
    """The first argument that has another position here, in words. Empty if there is none."""
    try:
        given, here = (inspect.signature(one).parameters for one in (theirs, ours))
    except (TypeError, ValueError):
        return ""
    places = [name for name, one in here.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    for place, (name, one) in enumerate(given.items()):
        is_same = places[place : place + 1] == [name]
        if one.kind is one.POSITIONAL_OR_KEYWORD and name in here and not is_same:
            return f"the argument {name} has another position"
    return ""


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _convert_result(function: Any) -> Any:
    """The function with its sharded entries converted to Megatron's."""

    @functools.wraps(function)
    def convert(*args: Any, **kwargs: Any) -> Any:
        from mcore.modules import to_megatron_sharded_state_dict

        return to_megatron_sharded_state_dict({"": function(*args, **kwargs)})[""]

    return convert


def _set_default_groups(*_: Any, **__: Any) -> None:
    from mcore.parallel import ProcessGroups, set_default_process_groups

    set_default_process_groups(ProcessGroups.from_megatron())


def _clear_default_groups(*_: Any, **__: Any) -> None:
    from mcore.parallel import clear_default_process_groups

    clear_default_process_groups()


def _set_experimental_flag(flag: bool) -> None:
    from mcore.versioning import set_experimental_flag

    set_experimental_flag(flag)


def format_report(rows: Sequence[Served]) -> Iterator[str]:
    """A line for each name that Megatron keeps, and the number of those that mcore serves."""
    left = [row for row in rows if row.source == "megatron"]
    yield from (f"{row.module}.{row.name}: Megatron's, {row.reason}" for row in left)
    served = sum(row.source == "mcore" for row in rows)
    absent = len(rows) - served - len(left)
    yield f"{served} names are mcore's, {len(left)} Megatron's, {absent} of modules not imported"
