"""Keys, passwords and tokens in settings and texts, found by their names and masked."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_MASK = "***"
_WORDS = (
    r"api[_-]?key|access[_-]?key|private[_-]?key|passw(?:or)?d|passphrase|secret|credential"
    r"|authorization"
)
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
_TOKEN_NAME = re.compile("token(?!iz)", re.IGNORECASE)
# Up to the last @ before the path: a password may contain one.
_USER_OF_URI = re.compile(r"(?<=://)[^/\s'\"]*@")
_ASSIGNED = re.compile(
    rf"((?:{_WORDS}|token)['\"]?\s*[=:]\s*['\"]?)(?:(?:basic|bearer)\s+)?[^\s'\"&,;)}}\]]+",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\b(basic|bearer)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# Shorter values of variables are words such as "true", which texts contain for other reasons.
_SHORTEST_KNOWN_SECRET = 8
_DEEPEST = 32  # a configuration may contain itself


def mask_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Replace the secrets in a text by ``***``.

    It masks the user and password of URIs, values after ``password=``, ``"token": `` and the like,
    basic and bearer authorizations, the values of secret environment variables, and the secrets
    in ``known``.

    Args:
        text: Any text, such as the text of an exception.
        known: Additional secrets.

    Returns:
        The text without them.

    Example:
        >>> mask_secrets("cannot reach postgresql://me:pw@host/runs?sslpassword=x&n=1")
        'cannot reach postgresql://***@host/runs?sslpassword=***&n=1'
    """
    of_environment = {
        value.strip()
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_KNOWN_SECRET and _is_secret_name(name, value)
    }
    # The longest first: one secret may be part of another.
    for secret in sorted({*known, *of_environment}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, _MASK)
    text = _USER_OF_URI.sub(f"{_MASK}@", text)
    text = _ASSIGNED.sub(rf"\1{_MASK}", text)
    return _HEADER.sub(rf"\1 {_MASK}", text)


def config_params(config: Any) -> dict[str, str]:
    """Flatten a configuration into texts by dotted name, as trackers show settings.

    Dataclasses, mappings, namespaces, and sequences that contain any of them are followed. Every
    other value becomes its text. A value is replaced by ``***`` if any part of its dotted name
    contains ``api_key``, ``password`` or ``secret``. Under ``token`` (but not ``tokeniz``) every
    value except a number is replaced. Secrets that :func:`mask_secrets` finds in other texts are
    masked too.

    Args:
        config: The configuration. None has no names.

    Returns:
        Texts by name, in the order of the configuration.

    Example:
        >>> config_params({"train": {"train_iters": 10}, "comet_api_key": "abc"})
        {'train.train_iters': '10', 'comet_api_key': '***'}
    """
    if config is None:
        return {}
    secrets = config_secrets(config)
    return {
        name: _MASK
        if value is not None and _is_secret_name(name, value)
        else mask_secrets(str(value), secrets)
        for name, value in _flatten("", config)
    }


def config_secrets(config: Any) -> list[str]:
    """Return the texts of four characters or more under the secret names of a configuration."""
    return [
        value.strip()
        for name, value in _flatten("", config)
        if isinstance(value, str) and _is_secret_name(name, value) and len(value.strip()) >= 4
    ]


@contextmanager
def without_secrets(tracker: str, known: Iterable[str] = ()) -> Iterator[None]:
    """Replace an exception whose text has secrets by a RuntimeError with the masked text."""
    try:
        yield
    except Exception as error:
        masked = mask_secrets(str(error), known)
        if masked == str(error):
            raise
        raise RuntimeError(f"{tracker}: {type(error).__name__}: {masked}") from None


def _is_secret_name(name: str, value: object) -> bool:
    """Return whether a dotted name is secret. A number under ``token`` is a count of tokens."""
    if _SECRET_NAME.search(name):
        return True
    return not isinstance(value, (int, float)) and bool(_TOKEN_NAME.search(name))


def _flatten(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    fields = _list_fields(value) if depth < _DEEPEST else {}
    if not fields:
        if prefix:  # else an empty configuration
            yield prefix, value
        return
    for name, inner in fields.items():
        yield from _flatten(f"{prefix}.{name}" if prefix else str(name), inner, depth + 1)


def _list_fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return vars(value)
    if isinstance(value, (list, tuple)) and any(_list_fields(item) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else {}
