"""The migration table: each documented Megatron name can be imported as the page states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from api_check.surface import CannotCheckError, Surface, read_surface
from monorepo.workspace import Workspace

PAGE = "tools/docs/migration.md"
OLD = {
    "megatron.core.utils",
    "megatron.core.transformer.module",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.utils",
    "megatron.bridge.training.utils.train_utils",
}
_ROW = re.compile(r"\| `(\w+)` \| `([\w.]+(?:`, `[\w.]+)*)` \| `([\w.]+)` \|")


def problems(workspace: Workspace) -> Iterator[str]:
    """Rows that disagree with the packages, a line each."""
    try:
        surfaces = {one.module: read_surface(one) for one in workspace.distributions.values()}
    except CannotCheckError as error:
        yield str(error)
        return
    seen = set()
    for line in (workspace.root / PAGE).read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        found = _ROW.match(line)
        if found is None or not OLD.issuperset(found[2].split("`, `")):
            yield f"{PAGE}: {line} has to begin with `NAME`, `MODULE OF MEGATRON`, ... and `MODULE`"
            continue
        name, new = found[1], found[3]
        if (name, new) in seen:
            yield f"{PAGE}: {new}.{name} is there twice"
        seen.add((name, new))
        yield from _check_place(name, new, surfaces)


def _check_place(name: str, new: str, surfaces: Mapping[str, Surface]) -> Iterator[str]:
    """Check that a name can be imported from a module.

    A name of a package has to be in its ``__all__``. A name with an underscore may instead be
    defined in a module of the package, or by the module's ``__getattr__``.
    """
    package = ".".join(new.split(".")[:2])
    surface = surfaces.get(package)
    if surface is None:
        yield f"{name}: {new} is not part of a package here"
    elif f"{package}.{name}" in surface.entries:
        if new != package:
            yield f"{name} is public and has to be imported from {package}, not {new}"
    elif new == package or not name.startswith("_"):
        yield f"{name} is not in __all__ of {package}"
    elif not surface.defines(f"{new}.{name}"):
        inside = new.removeprefix(f"{surface.module.path}.")
        has_getattr = surface.defines(f"{new}.__getattr__")
        if not has_getattr or f'"{name}"' not in surface.module[f"{inside}.__getattr__"].source:
            yield f"{name} is not defined in {new}"
