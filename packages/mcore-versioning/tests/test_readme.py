"""Tests of the statements and examples of the README."""

import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mcore.versioning
from mcore.versioning import (
    ExperimentalNotEnabledError,
    get_deprecation,
    is_experimental_api,
    is_internal_api,
    is_torch_min_version,
)


def _readme() -> str:
    """The file beside the tests, or the description of the installed package without it."""
    file = Path(__file__).parents[1] / "README.md"
    if file.exists():
        return file.read_text(encoding="utf-8")
    return str(metadata("mcore-versioning").get_payload())


README = _readme()


def _example(heading: str, number: int = 0) -> dict[str, Any]:
    """Run a code block of a section; returns the names that it defines."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[number]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_first_example(capsys: pytest.CaptureFixture[str]) -> None:
    expected = (
        "mean is deprecated since version 0.2.0. Use fast_mean instead. "
        "Will be removed in version 0.4.0."
    )
    assert expected in README
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        example = _example("Ten lines")
    assert [str(warning.message) for warning in caught] == [expected]
    assert [warning.filename for warning in caught] == ["README.md"]
    assert capsys.readouterr().out == f"2.0 2.0 {is_torch_min_version('2.11')}\n"
    with pytest.raises(ExperimentalNotEnabledError):
        example["fast_mean"]([1, 3])


def test_example_for_other_packages() -> None:
    example = _example("For the life cycle of your own package")
    assert is_experimental_api(example["draft"])
    assert is_experimental_api(example["Draft"])
    assert is_internal_api(example["helper"])
    assert get_deprecation(example["read"]).removal_version == "2.0.0"


def test_recipe_for_type_checkers_has_equal_texts() -> None:
    example = _example("For the life cycle of your own package", 1)
    read = example["read"]
    assert read.__deprecated__ == get_deprecation(read).message
    assert read.__wrapped__.__deprecated__ == read.__deprecated__


def test_every_name_in_the_text_exists() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    names = set(re.findall(r"`(\w+_\w+)[`(]", prose))
    known = {*mcore.versioning.__all__, "MCORE_EXPERIMENTAL", "__version__"}
    arguments = {"check_equality"}
    assert names - arguments <= known
    assert len(names) > 8


def test_precedence_of_the_switches_is_the_listed_one() -> None:
    section = README.split("## Gate experimental code\n")[1].split("\n## ")[0]
    assert "Each overrides those below it" in section
    lines = re.findall(r"^\d\. (.*)", section, re.MULTILINE)
    switches = ("experimental_enabled", "set_experimental_flag", "MCORE_EXPERIMENTAL")
    assert [name in line for name, line in zip(switches, lines, strict=True)] == [True] * 3
    code = (
        "from mcore.versioning import *\n"
        "seen = [is_experimental_enabled()]\n"  # the variable, which is on
        "set_experimental_flag(False)\n"
        "seen.append(is_experimental_enabled())\n"
        "with experimental_enabled():\n"
        "    seen.append(is_experimental_enabled())\n"
        "    set_experimental_flag(False)\n"
        "    seen.append(is_experimental_enabled())\n"
        "print(seen)"
    )
    environment = {**os.environ, "MCORE_EXPERIMENTAL": "1"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.strip() == "[True, False, True, True]"


def test_table_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## Check versions\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d\S*) \| (\S+) \| (yes|no)\b.*? \| (yes|no)\b", section, re.MULTILINE)
    assert len(rows) == 3
    for installed, requested, at_least, newer in rows:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=installed))
        assert is_torch_min_version(requested) is (at_least == "yes")
        assert is_torch_min_version(requested, check_equality=False) is (newer == "yes")
    vendor = SimpleNamespace(__version__="2.9.0a0+50eac811a6.nv25.09")
    monkeypatch.setitem(sys.modules, "torch", vendor)
    assert is_torch_min_version("2.9.0a0")
    assert is_torch_min_version("2.9.0", release_only=True)


def test_only_the_metadata_names_the_supported_pythons() -> None:
    classifiers = metadata("mcore-versioning").get_all("Classifier") or []
    assert any("Python :: 3." in each for each in classifiers)
    assert "Python 3." not in README
