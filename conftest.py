"""The caches of all tests: those of the user, without the token files of straggler controllers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def caches_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps token files, also those of killed processes, out of the home folder."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    caches = tmp_path_factory.mktemp("caches")
    for path in own.iterdir() if own.is_dir() else ():
        if path.name != "mcore-straggler":
            (caches / path.name).symlink_to(path)  # other programs fill theirs slowly
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches))
        yield
