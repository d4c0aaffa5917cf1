"""Finding Python interpreters of given versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_ASK = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"


def find_interpreters(
    versions: Iterable[str], environment: Mapping[str, str]
) -> dict[str, Path | None]:
    """Find one working interpreter per version.

    It looks for `python3.x` in the folders of `PATH`, then in the `versions` folder of pyenv
    (`PYENV_ROOT`, else `~/.pyenv`), newest first, then at the running interpreter. A candidate
    counts only if it starts and reports that version: shims may point nowhere.

    Args:
        versions: Such as `3.10`.
        environment: Where `PATH` and `PYENV_ROOT` are read.

    Returns:
        The path of the interpreter for each version, None where there is none.
    """
    return {
        version: next(
            (found for path in _candidates(version, environment) if (found := _ask(path, version))),
            None,
        )
        for version in versions
    }


def _candidates(version: str, environment: Mapping[str, str]) -> Iterator[Path]:
    for folder in environment.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder) / f"python{version}"
    pyenv = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = (pyenv / "versions").glob(f"{version}.*/bin/python")
    yield from sorted(installed, key=lambda path: _numbers(path.parts[-3]), reverse=True)
    yield Path(sys.executable)


def _numbers(name: str) -> tuple[int, ...]:
    """For sorting: 3.12.10 comes after 3.12.9."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _ask(candidate: Path, version: str) -> Path | None:
    """The interpreter behind a candidate, if it is one of that version."""
    if not candidate.is_file():
        return None
    try:
        answer = subprocess.run(
            [candidate, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(answer[1]) if answer[:1] == [version] and len(answer) > 1 else None
