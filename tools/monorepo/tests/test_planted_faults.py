"""Each planted fault turns its own check red and no other, on a copy of the repository."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monorepo.workspace import load_workspace, read_toml

ROOT = Path(__file__).parents[3]
CHECKS = ("types", "imports", "dependencies")
_IGNORED = shutil.ignore_patterns("__pycache__", "tests", "*.pyc")


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
    return folder


def red_checks(copy: Path) -> dict[str, str]:
    """Run the checks as ``hatch.toml`` has them; return what those that fail print."""
    scripts = read_toml(copy / "hatch.toml")["envs"]["default"]["scripts"]
    sources = [str(one.source) for one in load_workspace(copy).distributions.values()]
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(copy / "tools"), *sources]),
    }
    red = {}
    for check in CHECKS:
        command = shlex.split(scripts[check].replace("{args}", ""))
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            red[check] = done.stdout + done.stderr
    return red


def append(file: Path, text: str) -> None:
    """Add to the end of a file."""
    file.write_text(file.read_text(encoding="utf-8") + text, encoding="utf-8")


def import_between_siblings(copy: Path) -> None:
    """Declared, so that only the direction is wrong; an import straight up would be a circle."""
    append(
        copy / "packages/mcore-observe/src/mcore/observe/timers/__init__.py",
        "\n\ndef _planted() -> None:\n    import mcore.modules  # noqa: F401\n",
    )
    file = copy / "packages/mcore-observe/pyproject.toml"
    text = file.read_text(encoding="utf-8")
    added = text.replace("dependencies = [", 'dependencies = [\n    "mcore-modules>=0.1,<0.2",', 1)
    file.write_text(added, encoding="utf-8")


def undeclared_dependency(copy: Path) -> None:
    """The library is installed, so that everything works here."""
    append(
        copy / "packages/mcore-tensor/src/mcore/tensor/arithmetic.py",
        "\n\ndef _planted() -> None:\n    import numpy  # noqa: F401\n",
    )


def type_error_between_packages(copy: Path) -> None:
    """A number where the other package's function takes none."""
    append(
        copy / "packages/mcore-modules/src/mcore/modules/init_methods.py",
        '\n\ndef _planted() -> None:\n    from mcore.tensor import divide\n\n    divide("6", 2)\n',
    )


@pytest.mark.parametrize(
    ("plant", "check", "said"),
    [
        (import_between_siblings, "imports", "mcore.observe.timers -> mcore.modules"),
        (undeclared_dependency, "dependencies", "needs numpy, which is not declared"),
        (type_error_between_packages, "types", 'Argument 1 to "divide" has incompatible type'),
    ],
)
def test_fault_turns_its_own_check_red_and_no_other(
    copy: Path, plant: Callable[[Path], None], check: str, said: str
) -> None:
    kept = copy.with_name("kept")
    shutil.copytree(copy / "packages", kept)
    try:
        plant(copy)
        red = red_checks(copy)
    finally:
        shutil.rmtree(copy / "packages")
        kept.rename(copy / "packages")
    assert set(red) == {check}, "\n".join(red.values())
    assert said in red[check]


def test_import_straight_up_is_found(copy: Path) -> None:
    file = copy / "packages/mcore-tensor/src/mcore/tensor/arithmetic.py"
    text = file.read_text(encoding="utf-8")
    append(file, "\n\ndef _planted() -> None:\n    import mcore.parallel  # noqa: F401\n")
    red = red_checks(copy)
    file.write_text(text, encoding="utf-8")
    assert "mcore.tensor.arithmetic -> mcore.parallel" in red["imports"]
    assert "needs mcore-parallel, which is not declared" in red["dependencies"]
    assert set(red) == {"imports", "dependencies"}
