"""Tests of finding uv and of the variables that a clean environment does without."""

import sys
from pathlib import Path

import pytest

from monorepo.isolation.venv import clean_environment, find_uv


def test_variables_of_other_installations_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment()
    assert "PYTHONPATH" not in environment
    assert environment["KEPT"] == "yes"


def test_uv_is_found_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path before where hatch says, and that before the folder of this Python."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HATCH_UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside/python"))
    assert find_uv() is None
    for folder in ("beside", "hatch", "path"):
        uv = tmp_path / folder / "uv"
        uv.parent.mkdir()
        uv.touch(0o755)
        if folder == "hatch":
            monkeypatch.setenv("HATCH_UV", str(uv))
        if folder == "path":
            monkeypatch.setenv("PATH", str(uv.parent))
        assert find_uv() == str(uv)
