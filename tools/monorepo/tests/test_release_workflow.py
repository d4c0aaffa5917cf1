"""The workflow that publishes: valid, pinned, and with no more rights than it needs."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from monorepo.git_tags import parse_tag
from monorepo.toml_files import read_toml
from monorepo.workspace import load_workspace

ROOT = Path(__file__).parents[3]
FILE = ROOT / ".github/workflows/release.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(FILE.read_text())
    return loaded


def test_it_follows_the_schema_of_workflows() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(FILE)]
    finished = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (\S+)(.*)", FILE.read_text())
    assert len(used) > 8
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} without its version"


def test_the_publishing_job_can_do_nothing_else(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "${{ needs.plan.outputs.package }}"
    assert [step["uses"].split("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert set(publish["needs"]) == {"plan", "build"}
    assert set(jobs["build"]["needs"]) == {"plan", "checks", "isolated"}
    text = FILE.read_text()
    assert "secrets." not in text
    assert "password" not in text


def test_it_runs_for_the_tags_of_packages_only(workflow: dict[str, Any]) -> None:
    # YAML 1.1 readers take the key "on" for true.
    [pattern] = (workflow.get("on") or workflow[True])["push"]["tags"]
    names = load_workspace(ROOT).names
    for name in names:
        assert fnmatch.fnmatch(f"{name}-v0.1.0", pattern)
        assert parse_tag(f"{name}-v0.1.0", names).package == name
    assert not fnmatch.fnmatch("v0.1.0", pattern)


def test_its_commands_exist(workflow: dict[str, Any]) -> None:
    scripts = read_toml(ROOT / "hatch.toml")["envs"]["default"]["scripts"]
    runs = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    used = set(re.findall(r"hatch run (\S+)", "\n".join(runs)))
    assert {"check", "release", "isolated"} <= used
    assert used <= set(scripts)


def test_nothing_of_the_event_is_pasted_into_a_shell(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
