"""The shell steps of the workflows ci and release, run under bash."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import REPOSITORY, load_workspace


def read_jobs(workflow: str) -> dict[str, Any]:
    """The jobs of a workflow by name."""
    text = (REPOSITORY / f".github/workflows/{workflow}.yml").read_text()
    jobs: dict[str, Any] = YAML(typ="safe", pure=True).load(text)["jobs"]
    return jobs


def run_step(
    job: str, step: str, *, workflow: str = "ci", cwd: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does, with its outputs on standard output."""
    steps = read_jobs(workflow)[job]["steps"]
    [script] = [one["run"] for one in steps if one.get("name") == step]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables |= {"PATH": path, "PYTHONPATH": "tools", "GITHUB_OUTPUT": "/dev/stdout"}
    command = ["bash", "-eo", "pipefail", "-c", script]
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, check=False
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


def test_a_night_tests_everything() -> None:
    done = run_step("plan", "packages and cells that the change concerns", BASE="")
    plan = json.loads(done.stdout.removeprefix("matrix="))
    assert plan["packages"] == [*load_workspace(REPOSITORY).names]


def test_only_a_tag_of_main_is_released_and_only_from_main(tmp_path: Path) -> None:
    repository = SampleRepository(tmp_path)

    def plan(release: str, ref: str = "refs/heads/main") -> tuple[int, str]:
        name = "the commit to release is part of main"
        done = run_step(
            "plan", name, workflow="release", cwd=tmp_path, RELEASE=release, GITHUB_REF=ref
        )
        return done.returncode, done.stdout

    commits = []
    for tag in ("mcore-tensor-v0.1.0", "mcore-tensor-v0.2.0"):
        commits.append(repository.commit())
        repository.git("tag", "-a", "-m", tag, tag)
    first, head = commits
    repository.git("checkout", "-q", "-b", "mine")
    repository.commit("mcore-tensor-v0.3.0")
    repository.git("checkout", "-q", "main")
    assert plan("mcore-tensor-v0.1.0") == (0, f"tag=mcore-tensor-v0.1.0\ncommit={first}\n")
    assert plan("mcore-tensor") == (0, f"tag=\ncommit={head}\n")
    assert plan("mcore-tensor-v0.3.0") == (1, "mcore-tensor-v0.3.0 is not part of main\n")
    code, said = plan("mcore-tensor-v0.1.0", "refs/tags/mcore-tensor-v0.1.0")
    assert code == 1
    assert "start this on main" in said
    assert plan("mcore-tensor-v0*")[0] != 0


def test_every_job_compares_the_archives_with_the_hashes_of_their_build(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    for name in ("a.whl", "a.tar.gz"):
        (tmp_path / "dist" / name).write_text(name)
    built = run_step("build", "hashes of the archives", workflow="release", cwd=tmp_path)
    hashes = built.stdout.strip().removeprefix("hashes=")

    def compare(job: str) -> int:
        name = "the archives are those that were built"
        done = run_step(job, name, workflow="release", cwd=tmp_path, HASHES=hashes)
        return done.returncode

    jobs = read_jobs("release")
    using = [name for name, job in jobs.items() if "'path': 'dist/'" in str(job["steps"])]
    assert using == ["build", "verify", "rehearse", "publish", "announce"]
    for job in using[1:]:
        assert compare(job) == 0
        downloads = [place for place, one in enumerate(jobs[job]["steps"])
                     if "download-artifact" in one.get("uses", "")]  # fmt: skip
        assert "diff" in jobs[job]["steps"][downloads[0] + 1]["run"]
    (tmp_path / "dist" / "b.whl").touch()
    assert compare("publish") == 1
    (tmp_path / "dist" / "b.whl").unlink()
    (tmp_path / "dist" / "a.whl").write_text("another")
    assert compare("publish") == 1


def test_programs_of_a_release_are_installed_by_hash() -> None:
    jobs = read_jobs("release")
    scripts = [one.get("run", "") for job in jobs.values() for one in job["steps"]]
    for script in scripts:
        assert "uvx" not in script
        for line in script.splitlines():
            into_a_venv = "uv pip install" in line and "--python" in line
            assert "pip install" not in line or into_a_venv or "--require-hashes" in line
    # Before its hashes, the build uses no program of another source.
    words = [one.get("run", one.get("uses", "")) for one in jobs["build"]["steps"]]
    assert [word.split("@")[0].split()[0] for word in words] == [
        "actions/checkout", "actions/setup-python", "python", "cd", "echo",
        "actions/upload-artifact",
    ]  # fmt: skip


def test_every_reader_is_fuzzed_each_night() -> None:
    from fuzz.corpus import MADE

    assert read_jobs("nightly")["fuzz"]["strategy"]["matrix"]["reader"] == list(MADE)
