"""The MLflow store of a run: a file in its folder, or a given server or database."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pretrain.run_folder import RunFolder
from pretrain.usage import UsageError, clean

_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_ENVIRONMENT = "MLFLOW_TRACKING_URI"
_CREDENTIALS = tuple(
    f"MLFLOW_TRACKING_{name}"
    for name in ("TOKEN", "USERNAME", "PASSWORD", "AUTH", "AWS_SIGV4", "CLIENT_CERT_PATH")
)
_CREDENTIALS_FILE = Path("~/.mlflow/credentials")


@dataclass(frozen=True)
class MlflowTarget:
    """A tracking URI, which may contain a password, and its masked form."""

    uri: str = field(repr=False)
    shown: str
    is_own_file: bool = False
    is_foreign: bool = False  # only the run folder names it
    instead_of: str = ""  # the address in the run folder

    @property
    def is_server(self) -> bool:
        """Whether the target is a server with web pages."""
        return self.shown.split(":")[0] in _SERVERS


def choose_target(folder: RunFolder, given: str | None, *, trusted: bool = False) -> MlflowTarget:
    """The target of a start: the given one, the environment's, an earlier start's, or a file.

    Raises UsageError if the run folder names a database, or credentials cannot be withheld from
    the server that it names, unless it is ``trusted``.
    """
    if given is not None:
        return _parse_target(given, "--mlflow-uri")
    surrounding = os.environ.get(_ENVIRONMENT)
    earlier = read_facts(folder).get("tracking_uri")
    if folder.mlflow_facts.exists():
        if earlier is None:
            return _make_file_target(folder)
        earlier = clean(str(earlier))
        same = surrounding is not None and mask_uri(surrounding) == earlier
        if surrounding is not None and (same or not trusted):
            target = _parse_target(surrounding, _ENVIRONMENT)
            return target if same else replace(target, instead_of=earlier)
        if "***" in earlier:
            raise UsageError(
                f"--resume {folder.path}: it logs to {earlier}, and the password is not stored: "
                "pass --mlflow-uri or --no-mlflow"
            )
        target = _parse_target(earlier, "--resume")
        return target if trusted else _refuse_credentials(folder, target)
    if surrounding is None:
        return _make_file_target(folder)
    return _parse_target(surrounding, _ENVIRONMENT)


def report_trust(target: MlflowTarget) -> None:
    """Report the use of another address than the run folder's, or withhold credentials from that.

    Removes MLflow's credentials from the environment, for a server that only the folder names.
    """
    if target.instead_of:
        line = f"{_ENVIRONMENT} is used, not {target.instead_of} (--trust-run uses it)"
        print(f"pretrain: warning: {line}", file=sys.stderr, flush=True)
    if not target.is_foreign:
        return
    removed = [name for name in _CREDENTIALS if os.environ.pop(name, None) is not None]
    os.environ["NETRC"] = os.devnull  # its default entry is for every host
    withheld = ", ".join(removed) or "there are none"
    print(
        f"pretrain: warning: the run folder names {target.shown}, which gets metrics but no "
        f"credentials ({withheld}). To send them, pass --mlflow-uri {target.shown} or --trust-run",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _refuse_credentials(folder: RunFolder, target: MlflowTarget) -> MlflowTarget:
    if not target.is_server:
        problem = "a database that only the folder names"
    elif _CREDENTIALS_FILE.expanduser().exists():
        problem = f"which would get the credentials in {_CREDENTIALS_FILE}"
    else:
        return replace(target, is_foreign=True)
    raise UsageError(
        f"--resume {folder.path}: it logs to {target.shown}, {problem}. Pass --mlflow-uri "
        f"{target.shown}, --trust-run or --no-mlflow"
    )


def read_facts(folder: RunFolder) -> dict[str, Any]:
    """The stored facts about the MLflow run of earlier starts, or an empty dict."""
    try:
        facts = json.loads(folder.mlflow_facts.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def mask_uri(uri: str) -> str:
    """The URI, or the URIs in a text, without user and password."""
    if not set(uri) & set("@="):
        return uri
    from mcore.observe import mask_secrets

    return mask_secrets(uri)


def _make_file_target(folder: RunFolder) -> MlflowTarget:
    uri = f"sqlite:///{folder.mlflow_database}"
    if any(character in uri for character in "?#%"):
        raise UsageError(
            f"a URI cannot name a database in the folder {folder.path}: choose a path without "
            "?, # and %, or pass --no-mlflow"
        )
    return MlflowTarget(uri, uri, is_own_file=True)


def _parse_target(uri: str, source: str) -> MlflowTarget:
    target = MlflowTarget(uri, mask_uri(uri))
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{source} {target.shown} is not a URI: {mask_uri(str(error))}") from None
    scheme = parts.scheme.partition("+")[0]
    if scheme not in (*_SERVERS, *_DATABASES):
        raise UsageError(
            f"{source} {target.shown} must start with http://, https:// or the name of a database "
            "such as sqlite:///"
        )
    if scheme == "sqlite":
        _check_database(Path(uri.partition(":///")[2]), source)
    elif not host:
        raise UsageError(f"{source} {target.shown} has no host")
    return target


def _check_database(path: Path, source: str) -> None:
    if not path.name or path.is_dir():
        raise UsageError(f"{source} must name a file after sqlite:///, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"{source}: the folder {path.parent} of the database does not exist")
