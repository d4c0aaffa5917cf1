"""Reading TOML files on every Python that the packages support."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: The file.

    Returns:
        Its top-level table.

    Raises:
        ValueError: It is no TOML; the text names the file.
    """
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
