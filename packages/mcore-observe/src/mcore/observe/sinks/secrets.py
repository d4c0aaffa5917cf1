"""Keys, passwords and tokens in settings and texts, found by name or form and masked."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_MASK = "***"
# Names are compared by their words: api, key in "apiKey", "API_KEY" and "--api-key".
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET_PART = re.compile(
    "passw(?:or)?d|passphrase|contrasena|secret|credential|authorization|webhook"
    "|(?:api|access|account|auth|client|database|db|priv|private|service)key"
    "|(?:database|db|ftp|key|smtp|user)pass$|(?:amz|goog)signature"
)
_SECRET_WORDS = {"pwd", "pw", "sig"}
# Keys of records, tables and dictionaries are no secrets.
_OPEN_KEYS = re.compile(
    "answer|batch|cache|column|data|dataset|dict|feature|field|foreign|group|image|index|input|join"
    "|json|label|lookup|map|messages|metric|monitor|output|partition|primary|prompt|public|query"
    "|question|response|reward|sample|shard|sort|state|target|text"
)
# The tokens of a vocabulary, and counts of tokens.
_OPEN_TOKENS = re.compile(
    "added|additional|begin|bos|class|cls|decoder|end|eod|eos|image|last|mask|max|min|new|next|num"
    "|pad|prefix|sep|separator|special|start|stop|suffix|unk|unknown|vocab"
)
_TOKENS_OF = re.compile("access|api|auth|bearer|bot|hf|refresh|session")

_NAME = re.compile(
    r"""(?<![\w.-])(?P<dashes>--?)?(?P<name>[A-Za-z_][\w.-]*)
    (?:\\*['"]?\]?\s*(?:=>|:=|[=:])\s*|(?(dashes)(?:\\*['"]\s*,\s*|\s+(?!-(?!\w[\w-]{7})))|(?!)))""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""(?:[bru]{1,2}(?=['"]))?(?:
    \\{1,7}(?P<packed>['"])(?P<inner>.*?)\\{1,7}(?P=packed)  # in a text that is quoted itself
    |'(?P<single>(?:\\.|[^'\\]|'"'"')*)'|"(?P<double>(?:\\.|[^"\\])*)"  # '"'"' is a shell's '
    |(?P<list>[\[({][^\])}\n]*)
    |(?P<word>(?:(?:basic|bearer|token)\s+)?[^\s'"&,;)}\]]+)
    |['"](?P<rest>[^\n]*))""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_NO_SECRETS = ("", "None", "null", "True", "False", "true", "false")
# Up to the last @ before the path: a password may contain one.
_USER_OF_URI = re.compile(r"(?<=://)[^/\s'\"]*@")
_HOOK = re.compile(r"(?P<host>https?://[^\s'\"<>/]+/)(?P<path>[^\s'\"<>]+)", re.IGNORECASE)
_HEADER = re.compile(r"\b(basic|bearer)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_PEM = re.compile(
    r"(-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----).*?"
    r"(-----END (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
# Secrets that their issuers mark by form.
_MARKED = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    (?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}  # AWS
    |gh[pousr]_[A-Za-z0-9_]{36,}|github_pat_\w{22,}
    |gl(?:pat|dt|ft|soat|rt|ptt|cbt|imt|agent|oas|ffct)-[\w-]{20,}|GR1348941[\w-]{20,}  # GitLab
    |(?i:xox[a-z]-(?:[0-9]+-)+[a-z0-9]+)  # Slack
    |AKC[A-Za-z0-9]{10,}  # Artifactory
    |[rs]k_live_[0-9A-Za-z]{24,}  # Stripe
    |SG\.[\w-]{22}\.[\w-]{43}  # SendGrid
    |sq0csp-[\w\\-]{43}  # Square
    |pypi-[\w-]{16,}|sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|AIza[\w-]{35}
    |eyJ[\w=-]+\.[\w=-]+(?:\.[\w.+/=-]*)?  # JSON Web Token
    |[0-9a-z]{32}-us[0-9]{1,2}  # Mailchimp
    |(?:AC|SK)[a-z0-9]{32}  # Twilio
    |[0-9]{8,10}:[\w-]{35}  # Telegram
    |[MNO][A-Za-z0-9_-]{23,25}\.[\w-]{6}\.[\w-]{27}  # Discord
    )""",
    re.VERBOSE,
)
# Shorter values of variables are words such as "true", which texts contain for other reasons.
_SHORTEST_KNOWN_SECRET = 8
_DEEPEST = 32  # a configuration may contain itself


def mask_secrets(text: str, known: Iterable[str] = ()) -> str:
    """Replace the secrets in a text by ``***``, in a time proportional to its length.

    It masks the user and password of URIs, values of secret names (``password=``, ``"hf_token": ``,
    ``--api-key VALUE``, ``sig=``), basic and bearer authorizations, webhooks, private keys, tokens
    of known form, the values of secret environment variables, and the secrets in ``known``.

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
        if len(value) >= _SHORTEST_KNOWN_SECRET
        and name != "PWD"  # the folder of a shell
        and _is_secret_name(name, value)
    }
    # The longest first: one secret may be part of another.
    for secret in sorted(filter(None, {*known, *of_environment}), key=len, reverse=True):
        text = text.replace(secret, _MASK)
    text = _USER_OF_URI.sub(f"{_MASK}@", _PEM.sub(rf"\1{_MASK}\2", text))
    text = _mask_named(_HOOK.sub(_mask_hook, text))
    return _MARKED.sub(_MASK, _HEADER.sub(rf"\1 {_MASK}", text))


def config_params(config: Any) -> dict[str, str]:
    """Flatten a configuration into texts by dotted name, as trackers show settings.

    Dataclasses, mappings, namespaces, and sequences that contain any of them are followed. Every
    other value becomes its text, or its error's name if it has no text. A value is replaced by
    ``***`` if its dotted name contains ``api_key``, ``password`` or ``secret``, or ends in
    ``token`` or ``_key``. Names of tokens of a vocabulary and of keys in data are not secret, and
    neither is a number under ``token``. Secrets that :func:`mask_secrets` finds in other texts are
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
        if str(value) != "None" and _is_secret_name(name, value)
        else mask_secrets(str(value), secrets)
        for name, value in _flatten("", config)
    }


def config_secrets(config: Any) -> list[str]:
    """Return the texts of four characters or more under the secret names of a configuration."""
    texts = ((name, text.strip()) for name, text in _flatten("", config) if isinstance(text, str))
    # The texts of a configuration that was read back have None as a text.
    long = ((name, text) for name, text in texts if len(text) >= 4 and text not in _NO_SECRETS)
    return [text for name, text in long if _is_secret_name(name, text)]


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


def _mask_named(text: str) -> str:
    """Mask the values after secret names."""
    parts: list[str] = []
    done = 0
    for found in _NAME.finditer(text):
        if found.start() < done or not _is_secret_name(found["name"], ""):
            continue
        value = _VALUE.match(text, found.end())
        if value is not None and value.lastgroup is not None:
            group = "inner" if value.lastgroup == "packed" else value.lastgroup
            if value[group] not in _NO_SECRETS:
                parts += (text[done : value.start(group)], _MASK)
                done = value.end(group)
    return "".join((*parts, text[done:]))


def _mask_hook(url: re.Match[str]) -> str:
    """Mask the path of a webhook: it is enough to write there."""
    return f"{url['host']}{_MASK}" if "hook" in url[0].lower() else url[0]


def _is_secret_name(name: str, value: object) -> bool:
    """Return whether a dotted name is secret. A number under ``token`` is a count of tokens."""
    kind = _classify_name(name)
    return kind == "secret" or (kind == "token" and not isinstance(value, (int, float)))


@functools.lru_cache(maxsize=4096)
def _classify_name(name: str) -> str:
    """Return ``"secret"``, ``"token"`` or nothing. Each part of a dotted name may be secret."""
    kinds = [_classify_words(_WORD.findall(part)) for part in name.split(".")]
    return "secret" if "secret" in kinds else "token" if "token" in kinds else ""


def _classify_words(words: list[str]) -> str:
    lower = [word.lower() for word in words]
    if not lower:
        return ""
    before, last = lower[-2] if len(lower) > 1 else "", lower[-1]
    is_key = last in ("key", "keys") and bool(before) and not _OPEN_KEYS.fullmatch(before)
    if is_key or not _SECRET_WORDS.isdisjoint(lower) or _SECRET_PART.search("".join(lower)):
        return "secret"
    if last.endswith("token"):
        return "" if _OPEN_TOKENS.fullmatch(before) else "token"
    return "token" if last == "tokens" and (not before or _TOKENS_OF.fullmatch(before)) else ""


def _flatten(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    try:
        fields = list(_list_fields(value).items()) if depth < _DEEPEST else []
        if not fields:
            str(value)
    except Exception as error:  # of the value's own code, or of a list that contains itself
        fields, value = [], f"<{type(value).__name__}: {type(error).__name__}>"
    if not fields and prefix:  # else an empty configuration
        yield prefix, value
    for name, inner in fields:
        yield from _flatten(f"{prefix}.{name}" if prefix else str(name), inner, depth + 1)


def _list_fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return vars(value)
    if isinstance(value, (list, tuple)) and any(_list_fields(item) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else {}
