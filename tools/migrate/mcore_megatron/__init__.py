"""``import mcore_megatron`` serves mcore's names under Megatron's modules.

Import it before any module of Megatron. ``python -m mcore_megatron SCRIPT ...`` does this for a
script. See :class:`mcore_migrate.serving.Serving`.
"""

from __future__ import annotations

from collections.abc import Collection

from mcore_migrate.serving import Served, Serving

__all__ = ["Served", "install", "report", "uninstall"]

_serving = Serving()


def install(only: Collection[str] | None = None, exclude: Collection[str] = ()) -> None:
    """Serve other names than the import of this module did.

    Args:
        only: The names to serve, also those that are Megatron's otherwise. None means all others.
        exclude: Names to leave to Megatron.

    Raises:
        ValueError: A name is not on the migration page. Nothing changes.
        RuntimeError: A module of Megatron is imported already. Nothing changes.
    """
    global _serving
    new = Serving(only, exclude)
    _serving.stop()
    _serving = new


def uninstall() -> None:
    """Put Megatron's names back. Copies that other modules made stay mcore's."""
    _serving.stop()


def report() -> list[Served]:
    """List every name with its source, ``"mcore"`` or ``"megatron"``, and the reason."""
    return _serving.report()
