"""Import it before megatron.bridge: packages that it asks for and never calls here are empty."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import megatron
import megatron_on_cpu  # noqa: F401 - before megatron-core
from megatron.core.models import gpt  # noqa: F401 - it has to find the packages below absent

ABSENT = {
    *("datasets", "omegaconf", "regex", "rich", "six", "tqdm"),
    *("transformer_engine", "transformers", "triton"),
}


class _Anything(type):
    """Its classes have every attribute, and can be bases, decorators and types of arguments."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __call__(cls, *given: Any, **_: Any) -> Any:
        return given[0] if given else cls


class _Nothing(metaclass=_Anything): ...


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing, name)


class _Absent(MetaPathFinder, Loader):
    """The last finder: only packages that no other finder has are empty."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


sys.meta_path.append(_Absent())
# The package without its initial imports: the bridges of all models of transformers.
_spec = PathFinder.find_spec("megatron.bridge", megatron.__path__)
_bridge = sys.modules["megatron.bridge"] = ModuleType("megatron.bridge")
_bridge.__path__ = list(_spec.submodule_search_locations)
megatron.bridge = _bridge
