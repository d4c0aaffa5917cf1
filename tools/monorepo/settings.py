"""Facts that stand in several files, compared: packages, test matrix, workflows and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version
from ruamel.yaml import YAML

from monorepo.git_tags import git
from monorepo.hatch_settings import read_cells, read_torch_pin
from monorepo.workspace import PACKAGES_FOLDER, Distribution, Workspace, read_toml

WORKFLOWS = ".github/workflows"
CITATION = "CITATION.cff"
_PYTHON = "Programming Language :: Python :: "
_JUDGE = "check"  # the job whose result is the only required status
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def problems(workspace: Workspace) -> Iterator[str]:
    """Disagreements, a line each."""
    citation = YAML(typ="safe", pure=True).load((workspace.root / CITATION).read_text("utf-8"))
    for package in workspace.distributions.values():
        for problem in _describe_package(workspace, package, citation["url"]):
            yield f"{package.name}: {problem}"
    yield from _describe_matrix(workspace)
    yield from _describe_workflows(workspace.root)


def _describe_package(workspace: Workspace, package: Distribution, address: str) -> Iterator[str]:
    """Faults that neither the archives' checks nor the tests of a package would find."""
    licence = (workspace.root / "LICENSE").read_text(encoding="utf-8")
    copy = package.folder / "LICENSE"
    if not copy.is_file() or copy.read_text(encoding="utf-8") != licence:
        yield "LICENSE has to be a copy of the LICENSE at the root"
    names = [*workspace.closure(package.name), package.name]
    command = " ".join(["pip install", *(f"{PACKAGES_FOLDER}/{name}" for name in names)])
    if command not in (package.folder / "README.md").read_text(encoding="utf-8"):
        yield f"README.md has to show how to install from a clone: {command}"
    below = f"{PACKAGES_FOLDER}/{package.name}"
    urls = {
        "Homepage": address,
        "Source": f"{address}/tree/main/{below}",
        "Changelog": f"{address}/blob/main/{below}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    if read_toml(package.folder / "pyproject.toml")["project"].get("urls") != urls:
        yield f"[project.urls] has to be {urls}, with the url of {CITATION}"
    for one in package.requirements:
        operators = {each.operator for each in one.specifier}
        if operators & {"==", "==="}:
            yield f"pins {one}: users could not upgrade it; write a range"
        elif ">=" not in operators:
            yield f"requires {one}, which has no floor: write >= and a version"


def _describe_matrix(workspace: Workspace) -> Iterator[str]:
    """Promised or pinned versions that have no cell in the test matrix."""
    cells = read_cells(workspace.root)
    pythons = sorted({cell.python for cell in cells}, key=Version)
    environments = read_toml(workspace.root / "hatch.toml")["envs"]
    if environments["versions"]["matrix"][0]["python"] != pythons:
        yield f"hatch.toml: [envs.versions] and [envs.matrix] differ in Python: {pythons}"
    floors = {"the default environment": read_torch_pin(workspace.root)}
    for package in workspace.distributions.values():
        project = read_toml(package.folder / "pyproject.toml")["project"]
        promised = [
            text.removeprefix(_PYTHON)
            for text in project.get("classifiers", ())
            if text.startswith(f"{_PYTHON}3.")
        ]
        if promised != pythons:
            yield f"{package.name}: classifiers promise {promised}, hatch.toml tests {pythons}"
        if not package.requires_python.contains(pythons[0]):
            yield f"{package.name}: requires-python leaves out Python {pythons[0]}"
        for one in package.dependencies:
            lowest = [each.version for each in one.specifier if each.operator == ">="]
            if one.name == "torch" and lowest:
                floors[package.name] = lowest[0]
    # "2.11" and "2.11.0" are the same version, but not the same text.
    for name, text in floors.items():
        tested = {cell.python for cell in cells if Version(cell.torch) == Version(text)}
        missing = [python for python in pythons if python not in tested]
        if missing:
            yield f"hatch.toml: no cell for torch {text} of {name} on Python {', '.join(missing)}"


def _describe_workflows(root: Path) -> Iterator[str]:
    """Jobs that could fail without a status, and commands that hatch.toml does not have."""
    scripts = read_toml(root / "hatch.toml")["envs"]["default"]["scripts"]
    for file in sorted((root / WORKFLOWS).glob("*.y*ml")):
        text = file.read_text(encoding="utf-8")
        jobs = YAML(typ="safe", pure=True).load(text)["jobs"]
        if _JUDGE in jobs:
            for name in sorted(jobs.keys() - {_JUDGE, *jobs[_JUDGE].get("needs", ())}):
                yield f"{file.name}: {_JUDGE} does not wait for {name}, which could fail unseen"
        for script in re.findall(r"hatch run ([\w-]+)(?![\w:.-])", text):
            if script not in scripts:
                yield f"{file.name}: hatch.toml has no command {script}"


def link_problems(root: Path) -> Iterator[str]:
    """Broken links in the documents that git tracks or would add."""
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
        elif heading and heading not in find_anchors(file.read_text(encoding="utf-8")):
            yield f"{shown} leads to no heading"


def find_anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    plain = (re.sub(r"[`*]|\[|\]\([^)]*\)", "", each) for each in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain}
