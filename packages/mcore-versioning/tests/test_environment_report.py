"""Tests of the report that goes into bug reports."""

import json
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore.versioning import __version__
from mcore.versioning.__main__ import main
from mcore.versioning.environment_report import EnvironmentReport, environment_report
from mcore.versioning.package_state import PackageState

NAMES = [
    "torch",
    "transformer-engine",
    "flash-attn",
    "mamba-ssm",
    "causal-conv1d",
    "mcore-versioning",
    "mcore-tensor",
    "mcore-parallel",
    "mcore-modules",
    "mcore-observe",
]
REPORT = EnvironmentReport(
    "CPython 3.11.7",
    "Linux-x86_64",
    (
        PackageState("torch", "2.13.0+cpu"),
        PackageState("flash-attn"),
        PackageState("mcore-tensor", None, "version 0.1.0 needs torch>=2.11"),
    ),
)


def test_text() -> None:
    assert REPORT.as_text() == (
        "Python        CPython 3.11.7\n"
        "platform      Linux-x86_64\n"
        "torch         2.13.0+cpu\n"
        "flash-attn    not installed\n"
        "mcore-tensor  present but unusable: version 0.1.0 needs torch>=2.11"
    )


def test_json() -> None:
    content = json.loads(REPORT.as_json())
    assert content["python"] == "CPython 3.11.7"
    assert content["platform"] == "Linux-x86_64"
    assert content["packages"] == [
        {"name": "torch", "status": "installed", "version": "2.13.0+cpu", "reason": None},
        {"name": "flash-attn", "status": "not installed", "version": None, "reason": None},
        {
            "name": "mcore-tensor",
            "status": "present but unusable",
            "version": None,
            "reason": "version 0.1.0 needs torch>=2.11",
        },
    ]


def test_report_of_this_environment() -> None:
    report = environment_report()
    assert [package.name for package in report.packages] == NAMES
    assert platform.python_version() in report.python
    versions = {package.name: package.version for package in report.packages}
    assert versions["mcore-versioning"] == __version__


def test_torch_floor_of_a_library_is_checked(install: Callable[..., Path]) -> None:
    install("torch", "2.0", module="torch")
    install(
        "flash-attn",
        "2.7",
        module="flash_attn",
        metadata="Requires-Dist: torch>=2.11\nRequires-Dist: absent-lib",
    )
    states = {package.name: package for package in environment_report().packages}
    expected = "present but unusable: version 2.7 needs torch>=2.11, and 2.0 is installed"
    assert str(states["flash-attn"]) == expected


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr().out
    report = environment_report()
    assert output == (report.as_json() if arguments else report.as_text()) + "\n"


def test_module_runs_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mcore.versioning", "--json"])
    monkeypatch.delitem(sys.modules, "mcore.versioning.__main__")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("mcore.versioning", run_name="__main__")
    assert caught.value.code == 0
    assert [package["name"] for package in json.loads(capsys.readouterr().out)["packages"]] == NAMES


def test_nothing_that_is_reported_is_imported() -> None:
    code = (
        "import sys; from mcore.versioning.__main__ import main; main([])\n"
        "loaded = {'torch', 'numpy', 'transformer_engine', 'flash_attn', 'mcore.tensor'}\n"
        "assert loaded.isdisjoint(sys.modules), loaded & set(sys.modules)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("Python  ")


def test_program_of_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    finished = subprocess.run(
        [sys.executable, "-m", "mcore.versioning"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines())
    assert lines["mcore-versioning"] == __version__
    assert lines["flash-attn"].startswith("present but unusable: flash_attn is only a folder")
