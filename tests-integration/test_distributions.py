"""The five distributions as they ship: their wheels, their metadata, and the one environment."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())


def metadata(package: str) -> dict[str, Any]:
    """The ``[project]`` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    return dict(tomllib.loads(text)["project"])


def version(package: str) -> str:
    """The version that the package's source file states."""
    source = ROOT / "packages" / package / "src/mcore" / package[6:] / "_version.py"
    return re.fullmatch(r'__version__ = "(.+)"\n', source.read_text())[1]


def build(source: Path, target: str, out: Path) -> Path:
    """Build a wheel or an sdist of a source tree as installers do; return the file."""
    hooks = importlib.import_module("hatchling.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)
        getattr(hooks, f"build_{target}")(str(out))
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel but the list of their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if "RECORD" not in name}


def test_there_are_five_packages() -> None:
    assert PACKAGES == [
        "mcore-modules", "mcore-observe", "mcore-parallel", "mcore-tensor", "mcore-versioning",
    ]  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_the_package_alone_and_the_sdist_builds_the_same(
    package: str, tmp_path: Path
) -> None:
    name = package[6:]
    files = contents(build(ROOT / "packages" / package, "wheel", tmp_path / "wheel"))
    assert f"mcore/{name}/py.typed" in files
    assert f"mcore/{name}/__init__.py" in files
    assert "mcore/__init__.py" not in files
    info = f"mcore_{name}-{version(package)}.dist-info/"
    assert all(path.startswith((f"mcore/{name}/", info)) for path in files)
    licence = next(body for path, body in files.items() if path.endswith("licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()

    sdist = build(ROOT / "packages" / package, "sdist", tmp_path / "sdist")
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / "tests").is_dir()
    assert contents(build(unpacked, "wheel", tmp_path / "rebuilt")) == files


def test_no_package_owns_the_namespace() -> None:
    assert list(ROOT.glob("packages/*/src/mcore/__init__.py")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_ranges_that_admit_them_and_torch_is_a_floor(package: str) -> None:
    requirements = [Requirement(text) for text in metadata(package)["dependencies"]]
    for requirement in requirements:
        operators = {part.operator for part in requirement.specifier}
        if requirement.name.startswith("mcore-"):
            assert operators == {">=", "<"}
            assert requirement.specifier.contains(version(requirement.name), prereleases=True)
        elif requirement.name == "torch" and package != "mcore-tensor":
            assert not operators  # mcore-tensor, which they all require, has the floor
        else:
            assert operators == {">="}
    names = {canonicalize_name(requirement.name) for requirement in requirements}
    assert ("torch" in names) == (package != "mcore-versioning")
    assert "mcore-tensor" in names or package in ("mcore-versioning", "mcore-tensor")


def test_no_environment_has_two_torch_pins() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "hatch", "env", "show", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    environments = json.loads(shown.stdout)
    assert {"default", "peers"} <= set(environments)
    for environment in environments.values():
        pins = [x for x in environment.get("dependencies", []) if Requirement(x).name == "torch"]
        assert len(pins) <= 1
    assert any(pin.startswith("torch==") for pin in environments["default"]["dependencies"])


def test_ci_ends_with_the_test_command_of_the_readme() -> None:
    last = (ROOT / ".ci/run").read_text().rstrip().splitlines()[-1]
    assert last == "hatch run test"
    assert f"pip install hatch && {last}\n" in (ROOT / "README.md").read_text()


def test_contributing_explains_every_command_once() -> None:
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    section = page.split("\n## Commands\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `hatch run ([\w-]+)` \|", section, re.MULTILINE)
    assert len(rows) == len(set(rows))
    named = set(re.findall(r"`hatch run ([\w-]+)[` ]", section))
    assert named == set(environments["default"]["scripts"])
    assert "`hatch run peers:parity`" in section
    assert "parity" in environments["peers"]["scripts"]


@pytest.mark.parametrize("page", ["README.md", ".github/CONTRIBUTING.md", ".ci/run"])
def test_links_and_commands_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    programs = {"mlflow"}
    used = set(re.findall(r"hatch run ([\w-]+)(?![\w.:-])", text))
    assert used <= {*environments["default"]["scripts"], *programs}


@pytest.mark.parametrize("package", PACKAGES)
def test_pythons_that_a_package_names_are_those_it_is_tested_on(package: str) -> None:
    matrix = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["matrix"]["matrix"]
    tested = {python for table in matrix for python in table["python"]}
    classifiers = " ".join(str(one) for one in metadata(package)["classifiers"])
    named = set(re.findall(r"Python :: (3\.\d+)", classifiers))
    assert named in (set(), tested)
    assert all(python in SpecifierSet(metadata(package)["requires-python"]) for python in tested)


def test_what_the_default_environment_hands_on_is_there() -> None:
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    handed = set()
    for name, line in environments["default"]["scripts"].items():
        if found := re.fullmatch(r"hatch run (\w+):([\w-]+) \{args\}", line):
            handed.add((found[1], found[2]))
            assert found[1] != "dev" or found[2] == name
        else:
            assert "python -m pretrain" in line
    own = {(env, name) for env in ("dev",) for name in environments[env]["scripts"]}
    assert handed >= own
    for env, name in handed:
        assert name in environments[env]["scripts"]
