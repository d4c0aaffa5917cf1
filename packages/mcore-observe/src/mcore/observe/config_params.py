"""Flattens a configuration into names and texts that trackers show, without its secrets."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["config_params"]

_MASK = "***"
_SECRET = re.compile("api_?key|password|secret", re.IGNORECASE)
_TOKEN = re.compile("token(?!iz)", re.IGNORECASE)


def config_params(config: Any) -> dict[str, str]:
    """Flatten a configuration into texts by dotted name.

    Dataclasses, mappings and namespaces are followed; all else becomes its text. The values of
    names that contain ``api_key``, ``password`` or ``secret``, and texts under names that contain
    ``token`` but not ``tokeniz``, are replaced by ``***``.

    Args:
        config: The configuration; None has no names.

    Returns:
        Texts by name, in the order of the configuration.

    Example:
        >>> config_params({"train": {"train_iters": 10}, "comet_api_key": "abc"})
        {'train.train_iters': '10', 'comet_api_key': '***'}
    """
    if config is None:
        return {}
    return {name: _text(name, value) for name, value in _flat("", config)}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    fields = _fields(value)
    if not fields:
        yield prefix, value
        return
    for name, inner in fields.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)


def _fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace):
        return vars(value)
    return value if isinstance(value, Mapping) else {}


def _text(name: str, value: Any) -> str:
    leaf = name.rpartition(".")[2]
    is_secret = _SECRET.search(leaf) or (_TOKEN.search(leaf) and isinstance(value, str))
    return _MASK if is_secret and value is not None else str(value)
