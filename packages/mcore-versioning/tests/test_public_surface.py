"""Tests of what the package exports and of what importing it costs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mcore.versioning

FORBIDDEN = (
    "torch",
    "numpy",
    "asyncio",
    "transformer_engine",
    "flash_attn",
    "mamba_ssm",
    "causal_conv1d",
    "typing_extensions",
    "importlib.metadata",
    "inspect",
)


def _loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return set(output.split())


def test_import_loads_nothing_heavy() -> None:
    front = _loaded_by("mcore.versioning") - _loaded_by("packaging.version")
    assert front <= {"mcore", "mcore.versioning", "mcore.versioning._version"}
    names = "mcore.versioning; from mcore.versioning import *; sys"
    added = _loaded_by(names) - _loaded_by("packaging.version")
    assert "mcore.versioning.installed" in added
    assert added.isdisjoint(FORBIDDEN)


def test_modules_are_attributes_without_an_import() -> None:
    code = "import mcore.versioning as v; print(v.config.ENABLE_EXPERIMENTAL, v.lookup.__name__)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    assert done.stdout.split() == [b"False", b"mcore.versioning.lookup"]


def test_all_is_sorted_and_every_name_exists() -> None:
    names = mcore.versioning.__all__
    assert names == sorted(names)
    for name in names:
        assert getattr(mcore.versioning, name) is not None


def test_all_lists_every_public_name_that_is_no_module() -> None:
    for name in mcore.versioning.__all__:
        getattr(mcore.versioning, name)  # names are loaded at their first use
    found = {
        name
        for name, value in vars(mcore.versioning).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "TYPE_CHECKING"
    }
    assert found <= set(mcore.versioning.__all__)
    assert set(mcore.versioning.__all__) - found <= {"__version__", "DeprecationInfo"}


def test_flag_module_is_importable_but_its_attribute_is_not_exported() -> None:
    from mcore.versioning import config

    assert config.ENABLE_EXPERIMENTAL is False
    assert not hasattr(mcore.versioning, "ENABLE_EXPERIMENTAL")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mcore.versioning.nothing  # noqa: B018
    assert mcore.versioning.DeprecationInfo.__name__ == "DeprecationInfo"


def test_namespace_has_no_init_and_the_package_is_typed() -> None:
    package = Path(mcore.versioning.__file__).parent
    assert not (package.parent / "__init__.py").exists()
    assert (package / "py.typed").exists()


def test_version_is_the_one_in_the_source() -> None:
    source = Path(mcore.versioning.__file__).with_name("_version.py").read_text()
    assert re.search(r'"(.+)"', source).group(1) == mcore.versioning.__version__


def test_every_public_function_has_an_example() -> None:
    without = [
        name
        for name in mcore.versioning.__all__
        if not name.startswith("__")
        and ">>>" not in (getattr(mcore.versioning, name).__doc__ or "")
    ]
    assert without == []
