"""Fixtures of several test files: a clean state, and packages that only seem installed."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore.versioning import clear_version_cache, config
from mcore.versioning.experimental import _find_owners


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts as rank 0 with the flag off and nothing cached."""
    for variable in ("RANK", "SLURM_PROCID", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", False)
    clear_version_cache()
    gc.disable()  # or what an earlier test left is collected, and warned about, in the midst of one
    yield
    gc.enable()
    clear_version_cache()
    _find_owners.cache_clear()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The records of this package alone: threads of other tests' libraries may log as well."""
    own = logging.Filter("mcore.versioning")
    caplog.handler.addFilter(own)
    yield caplog
    caplog.handler.removeFilter(own)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def install(site: Path) -> Callable[..., Path]:
    """Put a distribution into the folder: its metadata and, on request, a module and its record."""

    def install_distribution(
        name: str,
        version: str | None = "1.0",
        *,
        module: str | None = None,
        source: str = "",
        metadata: str = "",
        wheel: str | None = None,
        record: bool = True,
    ) -> Path:
        normalised = name.replace("-", "_")
        info = site / f"{normalised}-{version or 'none'}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}"]
        lines += [f"Version: {version}"] if version is not None else []
        lines += [metadata] if metadata else []
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if wheel is not None:
            (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {wheel}\n")
        recorded = [f"{info.name}/METADATA,,"]
        if module is not None:
            package = site / module
            package.mkdir(exist_ok=True)
            (package / "__init__.py").write_text(source)
            recorded += [f"{module}/__init__.py,,"]
        if record:
            (info / "RECORD").write_text("\n".join(recorded) + "\n")
        importlib.invalidate_caches()
        return info

    return install_distribution


@pytest.fixture
def unload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Take a module out of ``sys.modules`` now, and whatever has its name afterwards."""
    names: list[str] = []

    def unload_module(name: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        names.append(name)

    yield unload_module
    for name in names:
        sys.modules.pop(name, None)
