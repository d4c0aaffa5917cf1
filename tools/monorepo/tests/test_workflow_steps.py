"""The shell steps of the workflow ci, run under bash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from monorepo.workspace import REPOSITORY, load_workspace


def run_step(job: str, step: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does, with its outputs on standard output."""
    text = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    steps = YAML(typ="safe", pure=True).load(text)["jobs"][job]["steps"]
    [script] = [one["run"] for one in steps if one.get("name") == step]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {"PATH": path, "PYTHONPATH": "tools", "GITHUB_OUTPUT": "/dev/stdout"}
    command = ["bash", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ("success success success", 0),
        ("success skipped success", 0),
        ("success failure skipped", 1),
        ("success success cancelled", 1),
    ],
)
def test_all_jobs_have_to_succeed_or_be_skipped(results: str, status: int) -> None:
    done = run_step("check", "every job succeeded or was skipped", RESULTS=results)
    assert done.returncode == status


@pytest.mark.parametrize("base", ["", "0" * 40])
def test_a_first_push_and_a_night_test_everything(base: str) -> None:
    done = run_step("plan", "packages and cells that the change concerns", BASE=base)
    plan = json.loads(done.stdout.removeprefix("matrix="))
    assert plan["packages"] == [*load_workspace(REPOSITORY).names]
    jobs = [(job["package"], job["python"], job.get("torch")) for job in plan["include"]]
    assert {job[0] for job in jobs} == {*plan["packages"]}
    assert ("mcore-versioning", plan["pythons"][-1], None) in jobs
