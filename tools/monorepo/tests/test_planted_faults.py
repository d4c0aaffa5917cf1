"""Each planted fault turns its own check red, on a copy of the repository."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.__main__ import CHECKS
from monorepo.workspace import load_workspace, read_toml

ROOT = Path(__file__).parents[3]
_IGNORED = shutil.ignore_patterns("__pycache__", "tests", "*.pyc")
# Where each is planted, as a function, and what the check of that name says about it.
FAULTS = [
    ("observe/timers/__init__.py", "import mcore.modules", "imports", "observe.timers -> mcore.mo"),
    ("tensor/arithmetic.py", "import mcore.parallel", "imports", "arithmetic -> mcore.parallel"),
    ("versioning/config.py", "import torch", "imports", "mcore.versioning.config -> torch"),
    ("tensor/arithmetic.py", "import numpy", "dependencies", "numpy, which is not declared"),
    ("tensor/arithmetic.py", "import mcore.parallel", "dependencies", "mcore-parallel, which is"),
    (
        "modules/init_methods.py",
        'from mcore.tensor import divide; divide("6", 2)',
        "types",
        'Argument 1 to "divide" has incompatible type',
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's sources and settings, and what the type checker remembers of them."""
    folder = tmp_path_factory.mktemp("faults") / "repository"
    for name in ("packages", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=_IGNORED)
    for name in ("pyproject.toml", "hatch.toml"):
        shutil.copy(ROOT / name, folder)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")
    for place, code, _, _ in FAULTS:
        package = place.partition("/")[0]
        file = folder / f"packages/mcore-{package}/src/mcore" / place
        planted = f"\n\ndef _planted() -> None:\n    {code}  # noqa\n"
        file.write_text(file.read_text(encoding="utf-8") + planted, encoding="utf-8")
    return folder


@pytest.mark.parametrize("check", ["types", "imports"])
def test_a_check_names_its_own_faults(copy: Path, check: str) -> None:
    """The command is the one that ``hatch.toml`` has; types are checked where the fault is."""
    where = "packages/mcore-modules/src/mcore/modules/init_methods.py" if check == "types" else ""
    sources = [str(one.source) for one in load_workspace(copy).distributions.values()]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(copy / "tools"), *sources]),
    }
    command = read_toml(copy / "hatch.toml")["envs"]["dev"]["scripts"][check]
    done = subprocess.run(
        shlex.split(command.replace("{args}", where)),
        cwd=copy, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    _assert_named(check, done.stdout)


def test_the_check_of_dependencies_names_its_own_faults(copy: Path) -> None:
    _assert_named("dependencies", "\n".join(CHECKS["dependencies"](load_workspace(copy), None)))


def _assert_named(check: str, output: str) -> None:
    found = [said in output for _, _, _, said in FAULTS]
    assert found == [one == check for _, _, one, _ in FAULTS], output
