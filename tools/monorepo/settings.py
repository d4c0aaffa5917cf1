"""What the packages, the test matrix and the workflows say, held against each other."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version
from ruamel.yaml import YAML

from monorepo.hatch_settings import matrix_cells, torch_pin
from monorepo.workspace import (
    PACKAGES_FOLDER,
    REPOSITORY,
    Distribution,
    Workspace,
    load_workspace,
    read_toml,
)

WORKFLOWS = ".github/workflows"
_PYTHON = "Programming Language :: Python :: 3."
# The job whose result is the one status that a change needs.
_JUDGE = "check"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what does not agree; return 1 if anything does not."""
    parser = argparse.ArgumentParser(prog="python -m monorepo.settings", description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help=argparse.SUPPRESS)
    workspace = load_workspace(parser.parse_args(arguments).root)
    checks = (package_problems, matrix_problems, workflow_problems)
    found = [problem for check in checks for problem in check(workspace)]
    print("\n".join(found) or f"{len(workspace.names)} packages, matrix and workflows agree")
    return 1 if found else 0


def package_problems(workspace: Workspace) -> Iterator[str]:
    """Files that a package lacks or must not have, and folders that are none."""
    packages = workspace.distributions.values()
    folders = {path for path in (workspace.root / PACKAGES_FOLDER).iterdir() if path.is_dir()}
    for folder in sorted(folders - {one.folder for one in packages}):
        yield f"{PACKAGES_FOLDER}/{folder.name} has no pyproject.toml"
    licence = (workspace.root / "LICENSE").read_bytes()
    for package in packages:
        own = package.folder / "LICENSE"
        if not own.is_file() or own.read_bytes() != licence:
            yield f"{package.name}: LICENSE has to be a copy of the one at the root"
        if not (package.version_file.parent / "py.typed").is_file():
            yield f"{package.name}: py.typed is missing, so type checkers would ignore its types"
        for folder in package.version_file.parent.parents:
            if folder == package.source:
                break
            if (folder / "__init__.py").exists():
                yield (
                    f"{package.name}: delete {(folder / '__init__.py').relative_to(package.folder)}"
                    f": it would hide the other packages' part of the namespace {folder.name}"
                )
        named = [*workspace.closure(package.name), package.name]
        command = " ".join(["pip install", *(f"{PACKAGES_FOLDER}/{name}" for name in named)])
        if command not in (package.folder / "README.md").read_text(encoding="utf-8"):
            yield f"{package.name}: README.md has to say how to install from a clone: {command}"
        yield from _pins(package)


def _pins(package: Distribution) -> Iterator[str]:
    for requirement in package.requirements:
        if any(one.operator.startswith("==") for one in requirement.specifier):
            yield f"{package.name} pins {requirement}: users could not upgrade it; write a range"


def matrix_problems(workspace: Workspace) -> Iterator[str]:
    """Versions that are promised or pinned and have no cell in the test matrix."""
    cells = matrix_cells(workspace.root)
    pythons = sorted({cell.python for cell in cells}, key=Version)
    environments = read_toml(workspace.root / "hatch.toml")["envs"]
    if environments["versions"]["matrix"][0]["python"] != pythons:
        yield f"hatch.toml: [envs.versions] and [envs.matrix] differ in Python: {pythons}"
    floors = {"torch": torch_pin(workspace.root)}
    for package in workspace.distributions.values():
        project = read_toml(package.folder / "pyproject.toml")["project"]
        promised = [
            text.removeprefix(_PYTHON.removesuffix("3."))
            for text in project.get("classifiers", ())
            if text.startswith(_PYTHON)
        ]
        if promised != pythons:
            yield f"{package.name}: classifiers say Python {promised}, hatch.toml tests {pythons}"
        if not package.requires_python.contains(pythons[0]):
            yield f"{package.name}: requires-python leaves out Python {pythons[0]}"
        for one in package.dependencies:
            if one.name == "torch":
                floors[package.name] = next(iter(one.specifier)).version
    for who, text in floors.items():
        torch = Version(text)
        tested = {cell.python for cell in cells if Version(cell.torch) == torch}
        missing = [python for python in pythons if python not in tested]
        if missing:
            yield f"hatch.toml: no cell for torch {text} of {who} on Python {', '.join(missing)}"


def workflow_problems(workspace: Workspace) -> Iterator[str]:
    """Jobs and commands that a workflow names and that are not there."""
    scripts = read_toml(workspace.root / "hatch.toml")["envs"]["default"]["scripts"]
    for file in sorted((workspace.root / WORKFLOWS).glob("*.y*ml")):
        workflow = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8"))
        for said in (*_job_problems(workflow["jobs"]), *_command_problems(workflow, scripts)):
            yield f"{file.name}: {said}"


def _job_problems(jobs: Mapping[str, Any]) -> Iterator[str]:
    for name, job in jobs.items():
        needed = job.get("needs", [])
        needed = [needed] if isinstance(needed, str) else needed
        for other in needed:
            if other not in jobs:
                yield f"{name} needs {other}, which is no job of it"
        if name == _JUDGE:
            for other in jobs.keys() - {name, *needed}:
                yield f"{name} does not wait for {other}, which could fail unseen"


def _command_problems(workflow: Mapping[str, Any], scripts: Mapping[str, Any]) -> Iterator[str]:
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    runs = "\n".join(step.get("run", "") for step in steps)
    for script in re.findall(r"hatch run ([\w-]+)(?![\w:.-])", runs):
        if script not in scripts:
            yield f"hatch.toml has no command {script}"
    for module in re.findall(r"python -m (monorepo[.\w]*)", runs):
        path = Path(__file__).parents[1] / module.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield f"there is no module {module}"


if __name__ == "__main__":
    sys.exit(main())
