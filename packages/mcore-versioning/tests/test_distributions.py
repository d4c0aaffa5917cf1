"""Tests of reading what is installed: the right owner, with few files opened."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from mcore.versioning.distributions import owners_of, recorded_version

Install = Callable[..., Path]

# Prints the metadata files that a script opens, given as the first argument with its folder.
_OPENED = """
import os, sys
folder, script = sys.argv[1:]
sys.path.insert(0, folder)
import packaging.version
known = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
exec(compile(script, "script", "exec"), {"__name__": "acme_models.layers"})
print(*sorted(os.path.relpath(path, folder) for path in opened if path.startswith(folder)))
print(*sorted({"asyncio", "importlib.metadata", "inspect"} & set(sys.modules) - known))
"""


def _many(install: Install, count: int = 200) -> None:
    for number in range(count):
        install(f"library-{number}", module=f"package_{number}")


def _opened_by(script: str, folder: Path) -> tuple[list[str], list[str]]:
    finished = subprocess.run(
        [sys.executable, "-c", _OPENED, str(folder), script],
        capture_output=True,
        text=True,
        check=True,
    )
    files, loaded = finished.stdout.splitlines()
    return files.split(), loaded.split()


DECORATE = "import mcore.versioning as v\n@v.experimental_fn('1.0')\ndef f(): ..."


def test_first_gated_function_opens_its_own_distribution_among_200(
    install: Install, site: Path
) -> None:
    _many(install)
    install("acme-models", "1.2", module="acme_models")
    files, loaded = _opened_by(DECORATE, site)
    assert set(files) == {
        "acme_models-1.2.dist-info/METADATA",
        "acme_models-1.2.dist-info/RECORD",
    }
    assert len(files) <= 4
    assert loaded == []


def test_distribution_of_another_name_is_found_by_one_file_of_each(
    install: Install, site: Path
) -> None:
    _many(install, 50)
    install("big-project", "1.2", module="acme_models")
    files, loaded = _opened_by(DECORATE, site)
    others = [name for name in files if not name.startswith("big_project")]
    assert sorted(others) == sorted(f"library_{n}-1.0.dist-info/RECORD" for n in range(50))
    assert loaded == []


def test_distribution_of_the_same_name_that_brought_another_package(install: Install) -> None:
    install("acme-models", "1.0", module="something_else")
    install("big-project", "2.0", module="acme_models")
    assert owners_of("acme_models") == {"big-project": "2.0"}


@pytest.mark.parametrize("file", ["acme.py", "acme.abi3.so", "acme/__init__.pyd", "acme/x/y.py"])
def test_owner_by_each_kind_of_file(file: str, install: Install) -> None:
    info = install("odd-name", "3.0")
    (info / "RECORD").write_text(f"{file},sha256=x,3\nacme_too/__init__.py,,\n")
    assert owners_of("acme") == {"odd-name": "3.0"}
    assert owners_of("odd_name") == {}


def test_submodule_of_a_shared_namespace_has_one_owner(install: Install) -> None:
    for part in ("storage", "compute"):
        info = install(f"acme-{part}", module=None)
        (info / "RECORD").write_text(f"acme/{part}/__init__.py,,\n")
    assert set(owners_of("acme")) == {"acme-storage", "acme-compute"}
    assert set(owners_of("acme.compute")) == {"acme-compute"}


def test_old_and_editable_installations(site: Path, install: Install) -> None:
    egg = site / "Old_Tool.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Old.Tool\nVersion: 0.9\n")
    (egg / "top_level.txt").write_text("oldtool\n_oldtool\n")
    editable = install("edited", "0.3")
    (editable / "RECORD").write_text("__editable__.edited-0.3.pth,,\n")
    (editable / "top_level.txt").write_text("edited_package\n")
    assert owners_of("_oldtool") == {"Old.Tool": "0.9"}
    assert owners_of("edited_package") == {"edited": "0.3"}
    assert recorded_version("old-tool") == "0.9"


def test_places_that_are_no_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "archive.zip").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "archive.zip"), "/no/such/place", tmp_path])
    assert owners_of("packaging") == {}
    assert recorded_version("packaging") is None


def test_a_body_is_not_read_as_metadata(install: Install) -> None:
    install("talkative", None, metadata="Summary: x\n\nVersion: 6.6")
    assert recorded_version("talkative") is None


def test_really_installed_distributions_are_those_of_the_standard_library() -> None:
    names = sorted({name for names in packages_distributions().values() for name in names})
    assert {name: recorded_version(name) for name in names} == {
        name: version(name) for name in names
    }
