"""Flattens a configuration into names and texts that trackers show, without its secrets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from mcore.observe.secret_texts import MASK, is_secret_name, mask_secrets

__all__ = ["config_params", "config_secrets"]

_DEEPEST = 32  # a configuration that contains itself ends somewhere


def config_params(config: Any) -> dict[str, str]:
    """Flatten a configuration into texts by dotted name.

    Dataclasses, mappings, namespaces, and the sequences that hold any of them are followed; all
    else becomes its text. The values of names that contain ``api_key``, ``password`` or
    ``secret``, and all but numbers under names that contain ``token`` but not ``tokeniz``, are
    replaced by ``***``, whichever part of the dotted name it is; so is what
    :func:`mcore.observe.secret_texts.mask_secrets` finds in other texts.

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
    secrets = config_secrets(config)
    return {name: _text(name, value, secrets) for name, value in _flat("", config)}


def config_secrets(config: Any) -> list[str]:
    """List the texts of a configuration that are not to be shown anywhere.

    Args:
        config: As for :func:`config_params`.

    Returns:
        The texts under secret names, of four characters or more.

    Example:
        >>> config_secrets({"comet_api_key": "abcd", "num_tokens": 5})
        ['abcd']
    """
    return [
        value.strip()
        for name, value in _flat("", config)
        if isinstance(value, str) and is_secret_name(name, value) and len(value.strip()) >= 4
    ]


def _flat(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    fields = _fields(value) if depth < _DEEPEST else {}
    if not fields:
        yield prefix, value
        return
    for name, inner in fields.items():
        yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner, depth + 1)


def _fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return vars(value)
    if isinstance(value, (list, tuple)) and any(_fields(item) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else {}


def _text(name: str, value: Any, secrets: list[str]) -> str:
    if value is not None and is_secret_name(name, value):
        return MASK
    return mask_secrets(str(value), secrets)
