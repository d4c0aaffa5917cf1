"""Faults that a rehearsal refuses. ``.ci/run`` rehearses a release of the real packages."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monorepo.isolation.venv import IsolationError, make_venv
from monorepo.release.rehearse import find_installations, rehearse, run_first_example
from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import load_workspace

README = "# A\n\n```python\n{code}\n```\n\n```text\n{output}\n```\n"
METADATA = """\
authors = [{ name = "A" }]
keywords = ["a"]
classifiers = [
    "Development Status :: 4 - Beta",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.11",
]
dependencies"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleRepository:
    """Two packages without a fault."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base")
    made.add_package("mcore-upper", needs=("mcore-base>=0.1,<0.2",), code="import mcore.base\n")
    for name in ("base", "upper"):
        folder = f"packages/mcore-{name}"
        made.replace(f"{folder}/pyproject.toml", "dependencies", METADATA)
        readme = README.format(code=f"import mcore.{name}\nprint(7)", output="7")
        long = "A page about the purpose of the package. " * 5
        made.write({f"{folder}/README.md": readme + long})
    (tmp_path / "empty-index").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "empty-index").as_uri())
    return made


def _steps(repository: SampleRepository) -> Iterator[str]:
    workspace = load_workspace(repository.root)
    return rehearse(workspace, python=sys.executable, torch="2.13.0")


def test_a_missing_cap_is_found_when_users_upgrade(repository: SampleRepository) -> None:
    repository.replace("packages/mcore-upper/pyproject.toml", "base>=0.1,<0.2", "base>=0.1")
    before, said = repository.files(), []
    with pytest.raises(
        IsolationError, match=r"mcore-base 0\.1\.0 upgrades to 0\.2\.0 and not to 0\.1\.1"
    ):
        said.extend(_steps(repository))  # the lines before the error stay
    assert said == [
        "2 wheels and sdists pass twine, check-wheel-contents and pyroma",
        "mcore-base alone brings no sibling, and its first example runs",
        "mcore-upper alone brings mcore-base, and its first example runs",
    ]
    assert repository.files() == before


def test_a_page_that_an_index_shows_badly_is_refused(repository: SampleRepository) -> None:
    shutil.rmtree(repository.root / "packages/mcore-upper")
    repository.replace("packages/mcore-base/pyproject.toml", 'keywords = ["a"]\n', "")
    with pytest.raises(IsolationError, match=r"pyroma: .*keywords"):
        list(_steps(repository))


@pytest.mark.parametrize(
    ("readme", "said"),
    [
        ("# No example\n", "has no example in Python"),
        (README.format(code="print(1)", output="2"), "prints\n1\nand not\n2"),
        (README.format(code="import mcore.lost", output=""), "No module named 'mcore"),
    ],
)
def test_a_readme_that_does_not_hold_is_refused(
    repository: SampleRepository, tmp_path: Path, readme: str, said: str
) -> None:
    repository.write({"packages/mcore-base/README.md": readme})
    venv = make_venv(tmp_path / "venv", sys.executable, [])
    with pytest.raises(IsolationError, match=said):
        run_first_example(load_workspace(repository.root)["mcore-base"], venv)


def test_extras_of_the_page_are_installed(repository: SampleRepository) -> None:
    page = """```
pip install mcore-base
pip install "mcore-base[fast,late]"   # also: slow
pip install packages/mcore-base
```
```python
```
pip install mcore-base[after]
"""
    repository.write({"packages/mcore-base/README.md": page})
    base = load_workspace(repository.root)["mcore-base"]
    assert find_installations(base) == ["mcore-base", "mcore-base[fast,late]"]
