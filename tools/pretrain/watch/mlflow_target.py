"""Which MLflow a run logs to: a file of its own, or a server or database that was named."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pretrain.run_folder import RunFolder
from pretrain.usage import UsageError

_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_ENVIRONMENT = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class MlflowTarget:
    """A tracking URI, which may hold a password, and the form of it that may be shown."""

    uri: str = field(repr=False)
    shown: str
    is_own_file: bool = False

    @property
    def is_server(self) -> bool:
        """Whether it has a page of its own."""
        return self.shown.split(":")[0] in _SERVERS


def choose_target(folder: RunFolder, given: str | None) -> MlflowTarget:
    """The target of a start: the given one, an earlier start's, the environment's, or a file."""
    if given is not None:
        return _named(given, "--mlflow-uri")
    surrounding = os.environ.get(_ENVIRONMENT)
    earlier = read_facts(folder).get("tracking_uri") if folder.mlflow_facts.exists() else None
    if folder.mlflow_facts.exists():
        if earlier is None:
            return _own_file(folder)
        if surrounding is not None and mask_uri(surrounding) == earlier:
            return _named(surrounding, _ENVIRONMENT)
        if "***" in earlier:
            raise UsageError(
                f"--resume {folder.path}: it logs to {earlier}, whose password is not kept: give "
                "--mlflow-uri again, or --no-mlflow"
            )
        return _named(earlier, "--resume")
    return _own_file(folder) if surrounding is None else _named(surrounding, _ENVIRONMENT)


def read_facts(folder: RunFolder) -> dict[str, Any]:
    """What earlier starts noted about the MLflow run; empty where there was none."""
    try:
        facts = json.loads(folder.mlflow_facts.read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def mask_uri(uri: str) -> str:
    """The URI without user and password."""
    if not set(uri) & set("@="):
        return uri
    from mcore.observe import mask_secrets

    return mask_secrets(uri)


def _own_file(folder: RunFolder) -> MlflowTarget:
    uri = f"sqlite:///{folder.mlflow_database}"
    if any(character in uri for character in "?#%"):
        raise UsageError(
            f"a database in the folder {folder.path} cannot be named by a URI: choose a path "
            "without ?, # and %, or give --no-mlflow"
        )
    return MlflowTarget(uri, uri, is_own_file=True)


def _named(uri: str, source: str) -> MlflowTarget:
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
        raise UsageError(f"{source} {target.shown} names no host")
    return target


def _check_database(path: Path, source: str) -> None:
    if not path.name or path.is_dir():
        raise UsageError(f"{source} must name a file after sqlite:///, got {path}")
    if not path.parent.is_dir():
        raise UsageError(f"{source}: there is no folder {path.parent} for the database")
