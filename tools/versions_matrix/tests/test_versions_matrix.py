"""Tests of the program that runs the tests of mcore-versioning on several Pythons."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.hatch_settings import matrix_cells
from monorepo.sample_wheel import write_wheel
from monorepo.workspace import REPOSITORY, load_workspace
from versions_matrix.__main__ import PACKAGE, exit_code, main, provided, pythons
from versions_matrix.environments import clean_environment, find_uv, make_environment
from versions_matrix.interpreters import find_interpreters
from versions_matrix.selection import left_out

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def _executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _claims(version: str, name: str) -> str:
    return f"#!/bin/sh\necho {version}\necho {name}\n"


def test_interpreter_on_path_is_found_before_that_of_pyenv(tmp_path: Path) -> None:
    _executable(tmp_path / "bin" / "python3.77", _claims("3.77", "/from/path"))
    _executable(tmp_path / "versions" / "3.77.1" / "bin" / "python", _claims("3.77", "/from/pyenv"))
    environment = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path)}
    assert find_interpreters(["3.77"], environment) == {"3.77": Path("/from/path")}


def test_newest_patch_release_of_pyenv_is_taken(tmp_path: Path) -> None:
    for patch in ("9", "10", "2"):
        python = tmp_path / "versions" / f"3.77.{patch}" / "bin" / "python"
        _executable(python, _claims("3.77", f"/pyenv/{patch}"))
    found = find_interpreters(["3.77"], {"PYENV_ROOT": str(tmp_path)})
    assert found == {"3.77": Path("/pyenv/10")}


def test_shim_that_points_nowhere_is_passed_over(tmp_path: Path) -> None:
    _executable(tmp_path / "a" / "python3.77", "#!/bin/sh\nexit 127\n")
    _executable(tmp_path / "b" / "python3.77", _claims("3.6", "/another/version"))
    _executable(tmp_path / "c" / "python3.77", _claims("3.77", "/works"))
    path = os.pathsep.join(str(tmp_path / name) for name in ("a", "", "b", "c"))
    environment = {"PATH": path, "PYENV_ROOT": str(tmp_path / "none")}
    assert find_interpreters(["3.77"], environment) == {"3.77": Path("/works")}


def test_file_that_is_no_program_is_passed_over(tmp_path: Path) -> None:
    _executable(tmp_path / "python3.77", "not a program at all")
    environment = {"PATH": str(tmp_path), "PYENV_ROOT": str(tmp_path / "none")}
    assert find_interpreters(["3.77"], environment) == {"3.77": None}


def test_running_interpreter_is_found_and_others_are_missing(tmp_path: Path) -> None:
    found = find_interpreters([RUNNING, "3.99"], {"PATH": "", "PYENV_ROOT": str(tmp_path)})
    assert found == {RUNNING: Path(sys.executable), "3.99": None}


def test_pyenv_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / ".pyenv" / "versions" / "3.77.0" / "bin" / "python"
    _executable(python, _claims("3.77", "/home/pyenv"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_interpreters(["3.77"], {}) == {"3.77": Path("/home/pyenv")}


def test_files_are_left_out_for_what_they_import_at_the_top(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("import os\nimport pytest\nfrom mcore.x import y\n")
    (tmp_path / "test_heavy.py").write_text("import torch.nn\nfrom mypy import api\nimport os\n")
    (tmp_path / "test_inner.py").write_text("def test():\n    import torch\n")
    assert left_out(tmp_path, ("pytest", "mcore")) == {"test_heavy.py": ["mypy", "torch"]}


def test_most_of_the_package_runs_without_torch() -> None:
    package = load_workspace(REPOSITORY)[PACKAGE]
    tests = package.folder / "tests"
    skipped = left_out(tests, provided(package))
    assert set().union(*skipped.values()) <= {"torch", "rank_testing"}
    assert len(list(tests.glob("test_*.py"))) > 3 * len(skipped)


def test_pythons_are_those_of_the_matrix_that_the_package_supports(tmp_path: Path) -> None:
    package = load_workspace(REPOSITORY)[PACKAGE]
    cells = [cell.python for cell in matrix_cells(REPOSITORY)]
    assert pythons(package, REPOSITORY) == tuple(dict.fromkeys(cells))
    matrix = '[[envs.matrix.matrix]]\npython = ["3.11", "3.9", "3.10"]\ntorch = ["1", "2"]\n'
    (tmp_path / "hatch.toml").write_text(matrix)
    assert pythons(package, tmp_path) == ("3.10", "3.11")


def test_what_the_files_of_the_package_name_is_provided() -> None:
    assert {"mcore", "packaging", "pytest", "hypothesis"} <= provided(
        load_workspace(REPOSITORY)[PACKAGE]
    )


@pytest.mark.parametrize(
    ("outcomes", "require_all", "expected"),
    [
        (["passed", "passed"], False, 0),
        (["passed", "not found"], False, 0),
        (["passed", "not found"], True, 1),
        (["passed", "failed with status 1"], False, 1),
        (["not found", "could not be set up: exit status 1 of uv"], False, 1),
        (["not found", "not found"], False, 2),
    ],
)
def test_exit_code_is_the_worst_outcome(
    outcomes: list[str], require_all: bool, expected: int
) -> None:
    results = {str(number): outcome for number, outcome in enumerate(outcomes)}
    assert exit_code(results, require_all=require_all) == expected


def test_missing_interpreters_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert main(["3.98", "3.99"]) == 2
    output = capsys.readouterr().out
    assert "Python 3.98: not found" in output
    assert "Python 3.99: not found" in output


@pytest.mark.slow
def test_environment_is_made_with_venv_and_pip(tmp_path: Path) -> None:
    requirements = [str(write_wheel(tmp_path, "lonely", "1.0", code="answer = 42\n"))]
    python = make_environment(tmp_path / "venv", Path(sys.executable), requirements, None)
    command = [python, "-c", "import lonely, sys; print(lonely.answer, sys.prefix)"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["42", str(tmp_path / "venv")]


def test_environment_is_made_with_uv_where_it_is_given(tmp_path: Path) -> None:
    log = tmp_path / "log"
    uv = _executable(tmp_path / "uv", f'#!/bin/sh\necho "$@" >> {log}\n')
    python = make_environment(tmp_path / "venv", Path("/a/python"), ["x", "y"], [str(uv)])
    assert log.read_text().splitlines() == [
        f"venv --quiet --python /a/python {tmp_path / 'venv'}",
        f"pip install --quiet --python {python} x y",
    ]


def test_environment_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        make_environment(tmp_path / "venv", Path(sys.executable), [], [str(uv)])


def test_variables_of_other_installations_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("KEPT", "yes")
    environment = clean_environment()
    assert "PYTHONPATH" not in environment
    assert environment["KEPT"] == "yes"


def test_uv_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_uv() == [str(uv)]


def test_uv_is_found_beside_the_running_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HATCH_UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_uv() == [str(uv)]


def test_no_uv_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("HATCH_UV", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_uv() is None


def test_uv_that_hatch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = _executable(tmp_path / "uv", "#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HATCH_UV", str(uv))
    assert find_uv() == [str(uv)]
