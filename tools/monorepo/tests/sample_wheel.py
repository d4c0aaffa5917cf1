"""Wheels of a few lines, for tests without an index."""

from __future__ import annotations

import zipfile
from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, name: str, version: str, *needs: str, code: str = "") -> Path:
    """Write a wheel with one module.

    Args:
        folder: Where.
        name: Of the distribution and of the module.
        version: Of the distribution.
        needs: Its requirements.
        code: The text of the module.

    Returns:
        The file.
    """
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", _WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return wheel
