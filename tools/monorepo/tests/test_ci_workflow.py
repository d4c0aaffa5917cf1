"""The workflow that every change goes through."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[3]
FILE = ROOT / ".github/workflows/ci.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(FILE.read_text())["jobs"]
    return loaded


def test_one_job_judges_all_others(jobs: dict[str, Any]) -> None:
    assert set(jobs["check"]["needs"]) == set(jobs) - {"check"}
    assert jobs["check"]["if"] == "always()"


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ("success success success", 0),
        ("success skipped success", 0),
        ("success failure skipped", 1),
        ("failure skipped skipped", 1),
        ("success success cancelled", 1),
    ],
)
def test_all_have_to_succeed_or_be_skipped(jobs: dict[str, Any], results: str, status: int) -> None:
    (step,) = jobs["check"]["steps"]
    assert step["env"] == {"RESULTS": "${{ join(needs.*.result, ' ') }}"}
    finished = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        env={"RESULTS": results}, capture_output=True, check=False,
    )  # fmt: skip
    assert finished.returncode == status


def test_jobs_of_an_empty_matrix_are_skipped(jobs: dict[str, Any]) -> None:
    """A matrix without entries is an error."""
    for name, job in jobs.items():
        for axis in job.get("strategy", {}).get("matrix", {}):
            if axis == "include":
                assert job["if"] == "fromJSON(needs.plan.outputs.matrix).include[0]", name
            else:
                assert job["if"] == "fromJSON(needs.plan.outputs.matrix).packages[0]", name


def test_a_pull_request_is_compared_with_its_base(jobs: dict[str, Any]) -> None:
    runs = {step["run"]: step for step in jobs["checks"]["steps"] if "run" in step}
    changelog = runs['hatch run changelog --base "origin/$BASE"']
    assert changelog["env"] == {"BASE": "${{ github.base_ref }}"}
    for step in (changelog, runs["hatch run api-check --format github"]):
        assert "github.event_name == 'pull_request'" in step["if"]
    for name in ("plan", "checks", "everything"):
        (checkout,) = (s for s in jobs[name]["steps"] if "checkout@" in s.get("uses", ""))
        assert checkout["with"]["fetch-depth"] == 0, f"{name} needs history and tags"
