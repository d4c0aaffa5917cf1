"""Tests of finding uv and of the variables that a clean environment does without."""

import os
import stat
import sys
from pathlib import Path

import pytest

from monorepo.isolation.venv import clean_environment, find_uv


def _executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_variables_of_other_installations_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment()
    assert "PYTHONPATH" not in environment
    assert environment["KEPT"] == "yes"


def test_uv_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_uv() == [str(uv)]


def test_uv_is_found_beside_the_running_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HATCH_UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_uv() == [str(uv)]


def test_no_uv_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HATCH_UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_uv() is None


def test_uv_that_hatch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HATCH_UV", str(uv))
    assert find_uv() == [str(uv)]
