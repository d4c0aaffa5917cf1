"""Tests of what the README shows."""

import re
import warnings
from importlib.metadata import metadata
from pathlib import Path
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
from mcore.versioning.environment import environment_report


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


def test_every_public_name_is_mentioned() -> None:
    names = [name for name in mcore.versioning.__all__ if name != "__version__"]
    assert [name for name in names if f"`{name}`" not in README] == []


def test_sample_of_the_report_has_the_lines_of_a_real_one() -> None:
    section = README.split("## Environment report\n")[1].split("\n## ")[0]
    sample = re.findall(r"```\n(.*?)```", section, re.DOTALL)[0]
    real = environment_report().as_text()
    assert [line.split()[0] for line in sample.splitlines()] == [
        line.split()[0] for line in real.splitlines()
    ]
