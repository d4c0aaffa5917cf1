"""The migration table: each documented Megatron name is imported from where the page says."""

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
    """Rows that say something else than the packages, a line each."""
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
        yield from _wrong_places(name, new, surfaces)


def _wrong_places(name: str, new: str, surfaces: Mapping[str, Surface]) -> Iterator[str]:
    """Why a name is not imported from a module.

    A name of a package has to be in its ``__all__``; one with an underscore may instead be
    defined in a module of it.
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
    elif not surface.defines(f"{new}.{name}") and not _is_answered(name, new, surface):
        yield f"{name} is not defined in {new}"


def _is_answered(name: str, new: str, surface: Surface) -> bool:
    """Whether the ``__getattr__`` of the new module has a case for the name."""
    try:
        answers = surface.module[f"{new.removeprefix(f'{surface.module.path}.')}.__getattr__"]
    except KeyError:
        return False
    return f'"{name}"' in answers.source
