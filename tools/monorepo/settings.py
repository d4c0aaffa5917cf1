"""What the packages, the test matrix, the workflows and the documents say, held to the facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version
from ruamel.yaml import YAML

from monorepo.git_tags import git
from monorepo.hatch_settings import matrix_cells, torch_pin
from monorepo.workspace import (
    PACKAGES_FOLDER,
    Distribution,
    Workspace,
    read_toml,
)

WORKFLOWS = ".github/workflows"
CITATION = "CITATION.cff"
_FOR_THE_INDEX = ("description", "readme", "license", "authors", "maintainers", "keywords")
_PYTHON = "Programming Language :: Python :: "
# The job whose result is the one status that a change needs.
_JUDGE = "check"
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def problems(workspace: Workspace) -> Iterator[str]:
    """What does not agree, in a line each."""
    yield from package_problems(workspace)
    yield from matrix_problems(workspace)
    yield from workflow_problems(workspace)


def package_problems(workspace: Workspace) -> Iterator[str]:
    """What a package lacks or must not have, and folders that are none."""
    packages = workspace.distributions.values()
    folders = {path for path in (workspace.root / PACKAGES_FOLDER).iterdir() if path.is_dir()}
    for folder in sorted(folders - {one.folder for one in packages}):
        yield f"{PACKAGES_FOLDER}/{folder.name} has no pyproject.toml"
    licence = _text(workspace.root / "LICENSE")
    if not licence:
        yield "there is no LICENSE at the root"
    address = YAML(typ="safe", pure=True).load(_text(workspace.root / CITATION))["url"]
    for package in packages:
        for said in (
            *_file_problems(workspace, package, licence),
            *_project_problems(package, address),
        ):
            yield f"{package.name}: {said}"


def _file_problems(workspace: Workspace, package: Distribution, licence: str) -> Iterator[str]:
    if _text(package.folder / "LICENSE") != licence:
        yield "LICENSE has to be a copy of the one at the root"
    if not (package.version_file.parent / "py.typed").is_file():
        yield "py.typed is missing, so type checkers would ignore its types"
    parts = package.module.split(".")[:-1]
    for namespace in (package.source.joinpath(*parts[: n + 1]) for n in range(len(parts))):
        if (namespace / "__init__.py").exists():
            yield (
                f"delete {(namespace / '__init__.py').relative_to(package.folder)}: it would hide "
                f"the other packages' part of the namespace {namespace.name}"
            )
    named = [*workspace.closure(package.name), package.name]
    command = " ".join(["pip install", *(f"{PACKAGES_FOLDER}/{name}" for name in named)])
    if command not in _text(package.folder / "README.md"):
        yield f"README.md has to say how to install from a clone: {command}"


def _project_problems(package: Distribution, address: str) -> Iterator[str]:
    project = read_toml(package.folder / "pyproject.toml")["project"]
    if project.get("license-files") != ["LICENSE"]:
        yield 'license-files has to be ["LICENSE"], or the archives would have none'
    below = f"{PACKAGES_FOLDER}/{package.name}"
    urls = {
        "Homepage": address,
        "Source": f"{address}/tree/main/{below}",
        "Changelog": f"{address}/blob/main/{below}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    if project.get("urls") != urls:
        yield f"[project.urls] has to be {urls}, with the url of {CITATION}"
    for key in _FOR_THE_INDEX:
        if not project.get(key):
            yield f"its page on an index would have no {key}"
    for one in package.requirements:
        operators = {each.operator for each in one.specifier}
        if operators & {"==", "==="}:
            yield f"pins {one}: users could not upgrade it; write a range"
        elif ">=" not in operators:
            yield f"requires {one}, which has no floor: write >= and a version"


def _text(file: Path) -> str:
    """What a file has; nothing where there is none."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


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
            text.removeprefix(_PYTHON)
            for text in project.get("classifiers", ())
            if text.startswith(f"{_PYTHON}3.")
        ]
        if promised != pythons:
            yield f"{package.name}: classifiers say Python {promised}, hatch.toml tests {pythons}"
        if not package.requires_python.contains(pythons[0]):
            yield f"{package.name}: requires-python leaves out Python {pythons[0]}"
        for one in package.dependencies:
            lowest = [each.version for each in one.specifier if each.operator == ">="]
            if one.name == "torch" and lowest:
                floors[package.name] = lowest[0]
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
        workflow = YAML(typ="safe", pure=True).load(_text(file))
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


def link_problems(root: Path) -> Iterator[str]:
    """The links that lead nowhere in the documents that git knows or would take."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md")
    for document in (root / name for name in listed.split("\0") if name):
        if document.is_file():
            yield from broken_links(root, document)


def broken_links(root: Path, document: Path) -> Iterator[str]:
    """The links of a document to files or headings that do not exist, a line each."""
    text = _CODE.sub("", _FENCED.sub("", document.read_text(encoding="utf-8")))
    for target in _LINK.findall(text):
        if _ELSEWHERE.match(target):
            continue
        path, _, heading = target.partition("#")
        file = (root / path[1:] if path.startswith("/") else document.parent / path).resolve()
        file = document if not path else file
        shown = f"{document.relative_to(root)}: {target}"
        on_the_index = document.name == "README.md" and document.parents[1].name == PACKAGES_FOLDER
        if path and on_the_index:
            yield f"{shown} leads nowhere from the page that a package index shows"
        elif not file.exists():
            yield f"{shown} leads to no file"
        elif heading and heading not in headings(file.read_text(encoding="utf-8")):
            yield f"{shown} leads to no heading"


def headings(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", each) for each in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain}
