"""The extras of this distribution and their optional libraries."""

from __future__ import annotations

import functools
import re
from importlib import metadata

_THIS = "mcore-observe"
# Other distributions with the library of an extra, each of which is enough.
_SUBSTITUTES = {"tensorboard": ("tb-nightly",), "mlflow": ("mlflow-skinny",)}
_REQUIREMENT = re.compile(r"""([\w.-]+).*;.*\bextra *== *['"]([\w.-]+)['"]""")


def is_extra_installed(extra: str) -> bool:
    """Return whether the library of an extra is installed, without importing it."""
    return any(map(_has_metadata, (_read_library(extra), *_SUBSTITUTES.get(extra, ()))))


def require_extra(extra: str, needed_for: str) -> None:
    """Raise ModuleNotFoundError, naming the extra to install, if its library is missing."""
    if not is_extra_installed(extra):
        library = _read_library(extra)
        raise ModuleNotFoundError(
            f'{needed_for} needs {library}, which is not installed: pip install "{_THIS}[{extra}]"',
            name=library,
        )


def _read_library(extra: str) -> str:
    libraries = _read_extras()
    if extra not in libraries:
        raise ValueError(
            f"unknown extra {extra!r}; {_THIS} has {sorted(libraries)} (reinstall it after a "
            "change of its pyproject.toml)"
        )
    return libraries[extra]


@functools.cache
def _read_extras() -> dict[str, str]:
    """Return the distribution that each extra brings, as pyproject.toml declares it."""
    found = map(_REQUIREMENT.fullmatch, metadata.requires(_THIS) or ())
    return {match[2]: match[1] for match in found if match is not None}


def _has_metadata(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
