"""When ``hatch run test`` uses workers, and how it names failed tests."""

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


GROUPS = """
import os, pathlib, pytest

HERE = pathlib.Path(__file__)

def leave_worker(kind, number):
    HERE.with_name(f"{kind}-{HERE.stem}-{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(4))
def test_grouped(number):
    leave_worker("grouped", number)

@pytest.fixture(scope="module")
def shared(): pass

@pytest.mark.parametrize("number", range(4))
def test_sharing(number, shared):
    leave_worker("sharing", number)

@pytest.mark.parametrize("number", range(4))
def test_alone(number): pass
"""


def run(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, *, workers: int,
    code: int = 0,
) -> str:  # fmt: skip
    """Run pytest in a folder with the plugin and return what it printed."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tools"))
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", str(workers))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take most of the time
    plugins = ["-p", "monorepo.workers", *(() if "no:xdist" in arguments else ("-p", "xdist"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], "gw0"), (["folder/test_a.py::test_one"], "none"), (["-p", "no:xdist"], "none")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_workers_start_unless_a_file_is_named(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "test_a.py").write_text(TEST)
    monkeypatch.setenv("EXPECTED", expected)
    assert "1 passed" in run(arguments, tmp_path, monkeypatch, workers=1)


def test_groups_and_tests_that_share_a_fixture_stay_on_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("test_a", "test_b"):
        (tmp_path / f"{name}.py").write_text(GROUPS)
    run([], tmp_path, monkeypatch, workers=2)

    def workers(pattern: str) -> int:
        return len({file.read_text() for file in tmp_path.glob(pattern)})

    assert workers("grouped-*") == workers("sharing-test_a-*") == workers("sharing-test_b-*") == 1


FAILING = """
def test_fails(): assert False
def test_fails_too(): assert False
"""


@pytest.mark.parametrize("arguments", [[], ["test_a.py"]], ids=["workers", "alone"])
def test_failed_tests_are_named_before_the_end_and_in_the_last_lines(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_a.py").write_text(FAILING)
    lines = run(arguments, tmp_path, monkeypatch, workers=1, code=1).splitlines()
    first, second = (f"FAILED test_a.py::{name}" for name in ("test_fails", "test_fails_too"))
    [details] = [at for at, line in enumerate(lines) if "= FAILURES =" in line]
    assert lines.index(first) < lines.index(second) < details
    # Warnings of libraries at the end of the process follow.
    listed = [line.split(" - ")[0] for line in lines[-12:] if line.startswith("FAILED")]
    assert listed == [first, second]


def test_a_dead_worker_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = GROUPS.replace('leave_worker("grouped", number)', "number != 1 or os._exit(7)")
    (tmp_path / "test_a.py").write_text(dying)
    shown = run([], tmp_path, monkeypatch, workers=2, code=1)
    assert "crashed while running 'test_a.py::test_grouped[1]@one'" in shown
