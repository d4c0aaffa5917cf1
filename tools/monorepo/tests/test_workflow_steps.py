"""The shell steps of the workflows, run under bash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[3]


def run_step(
    workflow: str, job: str, step: str, tmp_path: Path, **environment: str
) -> tuple[int, str]:
    """Run a step as a runner does. Returns its status and its ``GITHUB_OUTPUT``."""
    text = (ROOT / ".github/workflows" / f"{workflow}.yml").read_text()
    steps = YAML(typ="safe", pure=True).load(text)["jobs"][job]["steps"]
    [script] = [one["run"] for one in steps if one.get("name") == step]
    output = tmp_path / "output"
    output.touch()
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=ROOT,
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": "tools",
            "GITHUB_OUTPUT": str(output),
            **environment,
        },
        capture_output=True,
        check=False,
    )
    return done.returncode, output.read_text()


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ("success success success", 0),
        ("success skipped success", 0),
        ("success failure skipped", 1),
        ("success success cancelled", 1),
    ],
)
def test_all_jobs_have_to_succeed_or_be_skipped(tmp_path: Path, results: str, status: int) -> None:
    name = "every job succeeded or was skipped"
    assert run_step("ci", "check", name, tmp_path, RESULTS=results)[0] == status


@pytest.mark.parametrize("base", ["", "0" * 40])
def test_a_first_push_and_a_night_test_everything(tmp_path: Path, base: str) -> None:
    name = "packages and cells that the change concerns"
    status, output = run_step("ci", "plan", name, tmp_path, BASE=base)
    plan = json.loads(output.removeprefix("matrix="))
    assert status == 0
    assert plan["packages"] == [
        "mcore-versioning", "mcore-tensor", "mcore-parallel", "mcore-modules", "mcore-observe",
    ]  # fmt: skip
    assert {"package": "mcore-versioning", "python": "3.14", "direct": True} in plan["include"]
    newest = {"package": "mcore-observe", "python": "3.14", "torch": "2.13.0", "direct": True}
    assert newest in plan["include"]
