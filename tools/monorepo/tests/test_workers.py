"""When ``hatch run test`` uses workers: not for one file or test, nor against the options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.workspace import REPOSITORY

TEST = """
import os

def test_one():
    assert os.environ.get("PYTEST_XDIST_WORKER", "none") == os.environ["EXPECTED"]
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "gw0"),
        (["folder/test_a.py::test_one"], "none"),
        (["-n", "0"], "none"),
        (["-p", "no:xdist"], "none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_workers_start_unless_a_file_is_named(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test_a.py").write_text(TEST)
    monkeypatch.setenv("EXPECTED", expected)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tools"))
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "monorepo.workers", "-q", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_test_command_uses_the_plugin() -> None:
    assert (
        '\ntest = "pytest -p monorepo.workers {args}"\n' in (REPOSITORY / "hatch.toml").read_text()
    )
