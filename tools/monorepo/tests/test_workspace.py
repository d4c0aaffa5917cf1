"""Reading the packages of a repository."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import WorkspaceError, load_workspace


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    """Four packages: top needs middle, middle needs base, side needs base."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base", version="1.2.0", needs=("packaging>=23.2",))
    made.add_package("mcore-middle", needs=("torch>=2.11", "mcore_base>=1,<2"))
    made.add_package("mcore-top", needs=("mcore-middle>=0.1,<0.2",))
    made.add_package("mcore-side", needs=("mcore-base>=1,<2",))
    return made


def test_fields_are_read_from_the_files(repository: SampleRepository) -> None:
    added = (
        '[project.optional-dependencies]\nfast = ["numba>=0.60"]\n'
        '[dependency-groups]\nlowest = ["numpy<2"]\n'
    )
    repository.replace("packages/mcore-base/pyproject.toml", "[dependency-groups]\n", added)
    base = load_workspace(repository.root)["mcore_base"]
    assert (base.name, base.module, base.version) == ("mcore-base", "mcore.base", Version("1.2.0"))
    assert base.dependencies == (Requirement("packaging>=23.2"),)
    assert not base.requires_python.contains("3.9")
    assert base.version_file == base.source / "mcore" / "base" / "_version.py"
    assert base.extras == {"fast": (Requirement("numba>=0.60"),)}
    assert base.requirements == (Requirement("packaging>=23.2"), Requirement("numba>=0.60"))
    assert base.test_dependencies == (Requirement("pytest>=8.3"),)
    assert base.lowest_constraints == (Requirement("numpy<2"),)


def test_order_closure_and_dependants(repository: SampleRepository) -> None:
    workspace = load_workspace(repository.root)
    assert workspace.names == ("mcore-base", "mcore-middle", "mcore-side", "mcore-top")
    assert workspace.closure("mcore-top") == ("mcore-base", "mcore-middle")
    assert workspace.closure("mcore-base") == ()
    assert workspace.direct_dependants("mcore-base") == ("mcore-middle", "mcore-side")
    assert workspace.dependants(["mcore-base"]) == ("mcore-middle", "mcore-side", "mcore-top")
    assert workspace.dependants(["mcore-middle", "mcore-side"]) == ("mcore-top",)
    assert workspace.order(["mcore-top", "mcore-base"]) == ("mcore-base", "mcore-top")


def test_names_are_chosen_by_any_spelling(repository: SampleRepository) -> None:
    workspace = load_workspace(repository.root)
    assert workspace.choose([]) == workspace.names
    assert workspace.choose(["mcore-top", "mcore_base"]) == ("mcore-base", "mcore-top")
    with pytest.raises(WorkspaceError, match=r"'mcore-lost' is not a package.*mcore-base"):
        workspace.choose(["mcore-lost"])


def test_circles_are_refused(repository: SampleRepository) -> None:
    repository.add_package("mcore-base", needs=("mcore-top>=0.1",))
    with pytest.raises(WorkspaceError, match=r"need each other: .*mcore-base, mcore-middle"):
        load_workspace(repository.root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('requires-python = ">=3.10"', "", "no text under project.requires-python"),
        ("_version.py", "_lost.py", "does not exist: it has to contain __version__"),
        ("[project]", "[project", "is not valid TOML"),
        ("_version.py", "__init__.py", "has 0 lines such as __version__"),
    ],
)
def test_incomplete_file_is_named(
    repository: SampleRepository, old: str, new: str, message: str
) -> None:
    repository.replace("packages/mcore-side/pyproject.toml", old, new)
    with pytest.raises(ValueError, match=message):
        load_workspace(repository.root)
