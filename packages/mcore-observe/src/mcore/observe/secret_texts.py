"""Finds keys, passwords and tokens in names and texts, and masks them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["MASK", "is_secret_name", "mask_secrets", "without_secrets"]

MASK = "***"

_WORDS = (
    r"api[_-]?key|access[_-]?key|private[_-]?key|passw(?:or)?d|passphrase|secret|credential"
    r"|authorization"
)
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
_TOKEN_NAME = re.compile("token(?!iz)", re.IGNORECASE)
# Up to the last @ before the path: a password may hold one.
_USER_OF_URI = re.compile(r"(?<=://)[^/\s'\"]*@")
_ASSIGNED = re.compile(
    rf"([\w-]*(?:{_WORDS}|token)['\"]?\s*[=:]\s*['\"]?)(?:(?:basic|bearer)\s+)?[^\s'\"&,;)}}\]]+",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\b(basic|bearer)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# Shorter values of variables are words such as "true", which texts contain for other reasons.
_SHORTEST_KNOWN_SECRET = 8


def is_secret_name(name: str, value: object = "") -> bool:
    """Say whether a setting of this name is not to be shown.

    Args:
        name: The name; dots separate its parts, of which one is enough.
        value: What it holds. Names with ``token`` are secret unless they hold a number, since
            numbers of tokens are none.

    Returns:
        Whether the name contains an API, access or private key, a password, a passphrase, a
        secret, a credential, an authorization, or ``token`` other than in ``tokenizer``.

    Example:
        >>> is_secret_name("comet_api_key"), is_secret_name("num_tokens", 2048)
        (True, False)
    """
    if _SECRET_NAME.search(name):
        return True
    return not isinstance(value, (int, float)) and bool(_TOKEN_NAME.search(name))


def mask_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Replace the secrets in a text by ``***``.

    Masked are user and password of URIs, what follows ``password=``, ``"token": `` and the like,
    basic and bearer authorizations, the values of secret environment variables, and what the
    caller knows to be secret.

    Args:
        text: Any text, such as that of an exception.
        known: Further secrets.

    Returns:
        The text without them.

    Example:
        >>> mask_secrets("cannot reach postgresql://me:pw@host/runs?sslpassword=x&n=1")
        'cannot reach postgresql://***@host/runs?sslpassword=***&n=1'
    """
    for secret in sorted({*known, *_environment_secrets()}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, MASK)
    text = _USER_OF_URI.sub(f"{MASK}@", text)
    text = _ASSIGNED.sub(rf"\1{MASK}", text)
    return _HEADER.sub(rf"\1 {MASK}", text)


@contextmanager
def without_secrets(tracker: str, known: Iterable[str] = ()) -> Iterator[None]:
    """Let no exception of a tracker's client out whose text has secrets.

    Args:
        tracker: Name of the tracker for the message.
        known: Further secrets, as for :func:`mask_secrets`.

    Raises:
        RuntimeError: Instead of such an exception, with its type and masked text; others leave
            as they are.

    Example:
        >>> with without_secrets("MLflow"):
        ...     raise ValueError("no such host: http://me:pw@host")
        Traceback (most recent call last):
        ...
        RuntimeError: MLflow: ValueError: no such host: http://***@host
    """
    try:
        yield
    except Exception as error:
        masked = mask_secrets(str(error), known)
        if masked == str(error):
            raise
        raise RuntimeError(f"{tracker}: {type(error).__name__}: {masked}") from None


def _environment_secrets() -> Iterable[str]:
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_KNOWN_SECRET and is_secret_name(name, value):
            yield value.strip()
