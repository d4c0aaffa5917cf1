"""Tests of reading the distributions of a repository."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from monorepo.tests.sample_repository import SampleRepository
from monorepo.workspace import WorkspaceError, load_workspace

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    """A chain and one beside it: top needs middle, middle needs base, side needs base."""
    made = SampleRepository(tmp_path / "repository")
    made.add_package("mcore-base", version="1.2.0", needs=("packaging>=23.2",))
    made.add_package("mcore-middle", needs=("torch>=2.11", "mcore_base>=1,<2"))
    made.add_package("mcore-top", needs=("mcore-middle>=0.1,<0.2",))
    made.add_package("mcore-side", needs=("mcore-base>=1,<2",))
    return made


def test_five_packages_of_this_repository() -> None:
    workspace = load_workspace(REPOSITORY)
    assert workspace.names == (
        "mcore-versioning", "mcore-tensor", "mcore-parallel", "mcore-modules", "mcore-observe",
    )  # fmt: skip
    observe = workspace["mcore-observe"]
    assert observe.module == "mcore.observe"
    assert observe.folder == REPOSITORY / "packages" / "mcore-observe"
    assert observe.siblings == ("mcore-parallel", "mcore-tensor", "mcore-versioning")
    assert observe.requires("torch")
    assert not workspace["mcore-versioning"].requires("torch")


def test_fields_are_those_of_the_files(repository: SampleRepository) -> None:
    base = load_workspace(repository.root)["mcore_base"]
    assert base.name == "mcore-base"
    assert base.module == "mcore.base"
    assert base.version == Version("1.2.0")
    assert base.dependencies == (Requirement("packaging>=23.2"),)
    assert base.requires_python.contains("3.10")
    assert not base.requires_python.contains("3.9")
    assert (base.source / "mcore" / "base" / "_version.py") == base.version_file


def test_groups_and_extras_are_read(repository: SampleRepository) -> None:
    file = "packages/mcore-base/pyproject.toml"
    added = (
        '[project.optional-dependencies]\nfast = ["numba>=0.60"]\n'
        '[tool.monorepo]\nnot-on-an-index = ["own_kernels"]\n'
        '[dependency-groups]\nlowest = ["numpy<2"]\n'
    )
    repository.write({file: repository.read(file).replace("[dependency-groups]\n", added)})
    base = load_workspace(repository.root)["mcore-base"]
    assert base.extras == {"fast": (Requirement("numba>=0.60"),)}
    assert base.requirements == (Requirement("packaging>=23.2"), Requirement("numba>=0.60"))
    assert base.test_dependencies == (Requirement("pytest>=8.3"),)
    assert base.lowest_constraints == (Requirement("numpy<2"),)
    assert base.not_on_an_index == ("own_kernels",)


def test_order_closure_and_dependants(repository: SampleRepository) -> None:
    workspace = load_workspace(repository.root)
    assert workspace.names == ("mcore-base", "mcore-middle", "mcore-side", "mcore-top")
    assert workspace.closure("mcore-top") == ("mcore-base", "mcore-middle")
    assert workspace.closure("mcore-base") == ()
    assert workspace.direct_dependants("mcore-base") == ("mcore-middle", "mcore-side")
    assert workspace.dependants(["mcore-base"]) == ("mcore-middle", "mcore-side", "mcore-top")
    assert workspace.dependants(["mcore-middle", "mcore-side"]) == ("mcore-top",)
    assert workspace.ordered(["mcore-top", "mcore-base"]) == ("mcore-base", "mcore-top")


def test_names_are_chosen_by_any_spelling(repository: SampleRepository) -> None:
    workspace = load_workspace(repository.root)
    assert workspace.chosen([]) == workspace.names
    assert workspace.chosen(["mcore-top", "mcore_base"]) == ("mcore-base", "mcore-top")
    with pytest.raises(WorkspaceError, match=r"'mcore-lost' is not a package.*mcore-base"):
        workspace.chosen(["mcore-lost"])


def test_circle_is_refused(repository: SampleRepository) -> None:
    repository.add_package("mcore-base", needs=("mcore-top>=0.1",))
    with pytest.raises(WorkspaceError, match=r"need each other: .*mcore-base, mcore-middle"):
        load_workspace(repository.root)


def test_two_packages_of_one_name_are_refused(repository: SampleRepository) -> None:
    text = repository.read("packages/mcore-side/pyproject.toml")
    repository.write({"packages/other/pyproject.toml": text})
    with pytest.raises(WorkspaceError, match="have the same name"):
        load_workspace(repository.root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('requires-python = ">=3.10"', "", "no text under project.requires-python"),
        ("_version.py", "_lost.py", "does not exist; it has to state __version__"),
        ('path = "src/mcore', 'path = "lib/mcore', "has to lie in"),
        ("[project]", "[project", "is not valid TOML"),
    ],
)
def test_incomplete_file_is_named(
    repository: SampleRepository, old: str, new: str, message: str
) -> None:
    file = "packages/mcore-side/pyproject.toml"
    repository.write({file: repository.read(file).replace(old, new)})
    with pytest.raises(ValueError, match=message):
        load_workspace(repository.root)


@pytest.mark.parametrize(
    ("text", "count"), [("version = 1\n", 0), ('__version__ = "1"\n__version__ = "2"\n', 2)]
)
def test_a_version_is_stated_once(repository: SampleRepository, text: str, count: int) -> None:
    repository.write({"packages/mcore-side/src/mcore/side/_version.py": text})
    with pytest.raises(WorkspaceError, match=rf"has {count} lines such as __version__"):
        load_workspace(repository.root)
