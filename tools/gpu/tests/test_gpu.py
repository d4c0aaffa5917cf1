"""The command for a machine with one GPU, tried on the stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import importlib.util, pytest, time
def test_passes(): assert importlib.util.find_spec("standin")
def test_fails(): assert 1 == 2
def test_hangs(): time.sleep(90)
def test_skips(): pytest.skip("not today")
def test_lacks(): pytest.importorskip("no_such_library")
def test_has(): pytest.skip("could not import 'json': a lie")
def test_two(): pytest.skip("fewer than two GPUs: a copy")
"""


@pytest.mark.slow
def test_the_command_reports_every_problem(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    command = ["bash", Path(__file__).parents[1] / "run.sh", tmp_path, "--device", "standin"]
    done = subprocess.run(
        [*command, "--tests", tmp_path, "--steps", "2"], capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable, "GPU_TEST_LIMIT_S": "4"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    outcomes = {line["name"].rpartition("::")[2]: line["outcome"] for line in lines[1:]}
    assert outcomes["test_fails"] == outcomes["test_hangs"] == "failed"
    assert outcomes["test_skips"] == outcomes["test_has"] == "skipped without need"
    assert outcomes["test_lacks"] == outcomes["test_two"] == "skipped"
    assert outcomes["test_passes"] == outcomes["rows"] == outcomes["main job"] == "passed"
    rows = [line for line in lines if line["kind"] == "row"]
    assert sum(row["outcome"] == "passed" and row["ours_s"] > 0 for row in rows) == len(rows) > 12
    assert "Skipped: not today" in (tmp_path / "gpu.md").read_text()
    assert "test_it.py::test_hangs: failed: " in done.stdout
