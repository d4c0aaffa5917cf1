"""What holds for every workflow: valid, with commands that exist, and with nothing to inject."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from monorepo.workspace import read_toml

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture(params=FILES, ids=[file.stem for file in FILES])
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe", pure=True).load(request.param.read_text())
    return loaded


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of all jobs."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_they_follow_the_schema_of_workflows() -> None:
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    finished = subprocess.run(
        [sys.executable, *command, *map(str, FILES)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_commands_exist(workflow: dict[str, Any]) -> None:
    scripts = read_toml(ROOT / "hatch.toml")["envs"]["default"]["scripts"]
    runs = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    used = set(re.findall(r"hatch run (\S+)", runs))
    assert used
    assert used <= set(scripts)
    for module in re.findall(r"python -m (monorepo[.\w]*)", runs):
        command = ROOT / "tools" / module.replace(".", "/")
        assert command.with_suffix(".py").is_file() or (command / "__main__.py").is_file(), module


def test_nothing_of_the_event_is_pasted_into_a_shell(workflow: dict[str, Any]) -> None:
    assert all("${{" not in step.get("run", "") for step in steps(workflow))


def test_jobs_read_unless_they_say_so_and_keep_no_token(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    checkouts = [step for step in steps(workflow) if "checkout@" in step.get("uses", "")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_jobs_end_and_failing_parts_of_a_pipe_count(workflow: dict[str, Any]) -> None:
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
    assert workflow["defaults"]["run"]["shell"] == "bash"  # which is with pipefail


def test_torch_is_the_cpu_build(workflow: dict[str, Any]) -> None:
    """uv alone obeys the setting; what pip installs must not lead to torch."""
    assert workflow["env"]["UV_TORCH_BACKEND"] == "cpu"
    lines = "\n".join(step.get("run", "") for step in steps(workflow)).splitlines()
    by_pip = [line for line in lines if "-m pip install" in line]
    assert by_pip
    assert not any(re.search(r"torch|mcore|packages/|dist/", line) for line in by_pip)
