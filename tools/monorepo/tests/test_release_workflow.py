"""The workflow that publishes: in the right order, and with no more rights than it needs."""

import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from monorepo.git_tags import parse_tag
from monorepo.workspace import load_workspace

ROOT = Path(__file__).parents[3]
FILE = ROOT / ".github/workflows/release.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(FILE.read_text())
    return loaded


def test_the_publishing_job_can_do_nothing_else(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "rehearse": {"id-token": "write"},
        "publish": {"id-token": "write"},
        "announce": {"contents": "write"},
    }
    for name in ("rehearse", "publish"):
        assert [step["uses"].split("@")[0] for step in jobs[name]["steps"]] == [
            "actions/download-artifact",
            "pypa/gh-action-pypi-publish",
        ]
    assert jobs["publish"]["environment"] == "${{ needs.plan.outputs.package }}"
    text = FILE.read_text()
    assert "secrets." not in text
    assert "password" not in text


def test_nothing_is_published_before_it_was_checked_and_rehearsed(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    assert set(jobs["build"]["needs"]) == {"plan", "checks", "isolated"}
    assert jobs["rehearse"]["needs"] == "build"
    assert "test.pypi.org" in jobs["rehearse"]["steps"][1]["with"]["repository-url"]
    assert set(jobs["publish"]["needs"]) == {"plan", "rehearse"}
    assert "repository-url" not in jobs["publish"]["steps"][1]["with"]
    assert set(jobs["announce"]["needs"]) == {"plan", "publish"}


def test_it_runs_for_the_tags_of_packages_only(workflow: dict[str, Any]) -> None:
    # YAML 1.1 readers take the key "on" for true.
    [pattern] = (workflow.get("on") or workflow[True])["push"]["tags"]
    names = load_workspace(ROOT).names
    for name in names:
        assert fnmatch.fnmatch(f"{name}-v0.1.0", pattern)
        assert parse_tag(f"{name}-v0.1.0", names).package == name
    assert not fnmatch.fnmatch("v0.1.0", pattern)
