"""The check of public names, on temporary repositories."""

from pathlib import Path

import pytest

from api_check.__main__ import main
from api_check.outcome import Outcome, check_package
from monorepo.tests.sample_repository import SampleRepository

MARKS = "from mcore.versioning import deprecated, experimental_fn, internal_api\n"
DUE = '@deprecated("1.0.0", removal_version="1.2.0")\n'
UNDATED = '@deprecated("1.0.0")\n'


@pytest.fixture
def repository(tmp_path: Path) -> SampleRepository:
    return SampleRepository(tmp_path)


def _after(
    repository: SampleRepository,
    before: str,
    after: str,
    version: str = "1.0.1",
    old_version: str = "1.0.0",
) -> Outcome:
    """Tag one text of the package as a release, then look at the next."""
    repository.add_package("mcore-tensor", version=old_version, code=before)
    repository.commit(f"mcore-tensor-v{old_version}")
    repository.set_code("mcore-tensor", after)
    repository.set_version("mcore-tensor", version)
    return check_package(repository.root, "mcore-tensor")


def _kinds(outcome: Outcome) -> list[tuple[str, str]]:
    return [(one.kind, one.path.removeprefix("mcore.tensor.")) for one in outcome.findings]


def test_a_removed_parameter_needs_a_major_version(repository: SampleRepository) -> None:
    outcome = _after(repository, "def f(a, b=1): ...\n", "\n\ndef f(a): ...\n")
    assert outcome.status == 1
    [finding] = outcome.findings
    assert (finding.kind, finding.path) == ("PARAMETER_REMOVED", "mcore.tensor.f")
    assert finding.old == "b = 1 (positional or keyword)"
    place = (finding.file, finding.line)
    assert place == ("packages/mcore-tensor/src/mcore/tensor/__init__.py", 3)
    repository.set_version("mcore-tensor", "2.0.0")
    outcome = check_package(repository.root, "mcore-tensor")
    assert outcome.status == 0
    assert [one.kind for one in outcome.findings] == ["PARAMETER_REMOVED"]


CASES = {
    "a minor bump before 1.0": ("def f(a): ...", "def f(): ...", "0.1.0 0.2.0", 0, "REMOVED f"),
    "a patch before 1.0": ("def f(a): ...", "def f(): ...", "0.1.0 0.1.1", 1, "REMOVED f"),
    "new function": ("def f(a): ...", "def f(a, c=1): ...\ndef g(a, b): ...", "", 0, ""),
    "internal": (f"{MARKS}@internal_api\ndef f(a): ...", "", "", 0, ""),
    "exempt with its members": (
        "import mcore.versioning as v\n@v.internal_api\nclass C:\n def m(self, a): ...\n"
        "class D:\n @property\n @v.internal_api\n def p(self): ...",
        "class C:\n def m(self): ...\nclass D: ...",
        "", 0, "",
    ),
    "demoted": (
        "def f(): ...\ndef g(): ...",
        f"{MARKS}@internal_api\ndef f(): ...\n@experimental_fn('1.0.1')\ndef g(): ...",
        "", 1, "API_DEMOTED f, API_DEMOTED g",
    ),
    "gone too early": (f"{MARKS}{DUE}def f(): ...", MARKS, "1.0.0 1.1.0", 1, "TOO_EARLY f"),
    "gone in time": (f"{MARKS}{DUE}def f(): ...", MARKS, "1.0.0 1.2.0", 0, "OBJECT_REMOVED f"),
    "gone without a date": (f"{MARKS}{UNDATED}def f(): ...", MARKS, "", 1, "OBJECT_REMOVED f"),
    "deprecated and changed": (
        f"{MARKS}{UNDATED}def f(a): ...", f"{MARKS}{UNDATED}def f(): ...",
        "", 1, "PARAMETER_REMOVED f",
    ),
    "overdue": (
        f"{MARKS}{DUE}def f(): ...", f"{MARKS}{DUE}def f(): ...",
        "1.0.0 1.2.0", 0, "OVERDUE f",
    ),
    "deprecated": ("def f(a): ...", f"{MARKS}{DUE}def f(a): ...", "", 0, ""),
    "still defined": (
        '__all__ = ["f", "g"]\ndef f(): ...\ndef g(): ...',
        '__all__ = ["g"]\ndef f(): ...\ndef g(): ...',
        "", 1, "EXPORT_REMOVED f",
    ),
    "reexport from another package": (
        '__all__ = ["f"]\nfrom mcore.versioning import f',
        '__all__ = ["f"]\nfrom mcore.versioning.other import f',
        "", 1, "REEXPORT_CHANGED f",
    ),
    "async": ("def f(): ...", "async def f(): ...", "", 1, "ASYNC_CHANGED f"),
    "result": ("def f() -> int: ...", "def f() -> str: ...", "", 0, "ANNOTATION_CHANGED f"),
    "annotation": ("def f(a: int): ...", "def f(a: str): ...", "", 0, "ANNOTATION_CHANGED f"),
    "value": ("f = 1", "f = 2", "", 0, "VALUE_CHANGED f"),
    "order of keywords": ("def f(*, a, b): ...", "def f(*, b, a): ...", "", 0, ""),
    "keywords of any name": ("def f(a, b=1): ...", "def f(a, **kw): ...", "", 1, "REMOVED f"),
    "base class": ("B = str\nclass f(B): ...", "B = str\nclass f: ...", "", 1, "REMOVED_BASE f"),
    "binding": (
        "class C:\n @staticmethod\n def m(): ...", "class C:\n def m(self): ...",
        "", 1, "BINDING_CHANGED C.m",
    ),
    "method": ("class C:\n def m(self): ...", "class C: ...", "", 1, "OBJECT_REMOVED C.m"),
    "private method": ("class C:\n def _m(self): ...", "class C: ...", "", 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_change_and_a_version_make_a_verdict(repository: SampleRepository, case: str) -> None:
    before, after, versions, status, kinds = CASES[case]
    old, new = (versions or "1.0.0 1.0.1").split()
    outcome = _after(repository, f"{before}\n", f"{after}\n", new, old_version=old)
    found = ", ".join(f"{kind} {path}" for kind, path in _kinds(outcome))
    assert outcome.status == status
    assert found.endswith(kinds) if kinds else not found


def test_the_tag_of_another_package_is_no_baseline(repository: SampleRepository) -> None:
    repository.add_package("mcore-parallel", version="9.0.0")
    repository.add_package("mcore-tensor", version="1.0.0", code="def f(a): ...\n")
    repository.commit("mcore-tensor-v1.0.0")
    repository.set_code("mcore-tensor", "def f(): ...\n")
    repository.commit("mcore-parallel-v9.0.0", "mcore-tensor-v2.0.0")
    # The tag of 2.0.0 is newer than the version that the files state.
    outcome = check_package(repository.root, "mcore-tensor")
    assert "against mcore-tensor-v1.0.0" in outcome.notice
    assert (outcome.status, _kinds(outcome)) == (1, [("PARAMETER_REMOVED", "f")])


def test_an_unknown_revision_or_package_cannot_be_checked(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_package("mcore-tensor")
    repository.commit()
    root = ["--root", str(repository.root)]
    assert main([*root, "--baseline", "nowhere"]) == 2
    assert "'nowhere' is not a revision" in capsys.readouterr().out
    assert main([*root, "--package", "mcore-nothing"]) == 2
    assert "Packages: mcore-tensor" in capsys.readouterr().err
    assert main(root) == 0
    assert "no release tag yet" in capsys.readouterr().out


def test_the_worst_package_decides_and_all_are_checked(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.add_package("mcore-parallel", code="def g(a): ...\n")
    repository.add_package("mcore-tensor", code="def f(a): ...\n")
    repository.commit("mcore-parallel-v0.1.0", "mcore-tensor-v0.1.0")
    repository.set_code("mcore-tensor", "def f(): ...\n")
    repository.set_code("mcore-parallel", "def g(: ...\n")
    assert main(["--root", str(repository.root)]) == 2
    printed = capsys.readouterr().out
    assert "cannot parse src/mcore/parallel/__init__.py" in printed
    assert "mcore-tensor: FAILED: " in printed
    assert "\n  FAIL    PARAMETER_REMOVED mcore.tensor.f: " in printed


def test_output_for_github_names_file_and_line(
    repository: SampleRepository, capsys: pytest.CaptureFixture[str]
) -> None:
    _after(repository, "def f(a): ...\n", "def f(): ...\n")
    assert main(["--root", str(repository.root), "--format", "github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == (
        "::error file=packages/mcore-tensor/src/mcore/tensor/__init__.py,line=1,"
        "title=PARAMETER_REMOVED::mcore.tensor.f: a (positional or keyword) -> (nothing)"
    )
    assert "\x1b" not in "".join(lines)


def test_a_removed_overload_is_a_break(repository: SampleRepository) -> None:
    def source(*types: str) -> str:
        overloads = "".join(f"@overload\ndef f(a: {one}) -> {one}: ...\n" for one in types)
        return f"from typing import overload\n{overloads}def f(a): ...\n"

    outcome = _after(repository, source("int", "str"), source("int", "bytes"))
    assert (outcome.status, _kinds(outcome)) == (1, [("OVERLOAD_REMOVED", "f")])
    repository.set_code("mcore-tensor", source("bytes", "str", "int"))
    assert check_package(repository.root, "mcore-tensor").findings == []


def test_moving_code_behind_a_reexport_is_no_break(repository: SampleRepository) -> None:
    folder = "packages/mcore-tensor/src/mcore/tensor"
    repository.write({f"{folder}/one.py": '__all__ = ["f"]\ndef f(a): ...\n'})
    repository.write({f"{folder}/two.py": ""})
    head = '__all__ = ["f"]\n'
    before, after = (f"{head}from mcore.tensor.{name} import f\n" for name in ("one", "two"))
    outcome = _after(repository, before, after)
    assert outcome.status == 1  # there is nothing in two.py yet
    repository.write({f"{folder}/two.py": "def f(a): ...\n", f"{folder}/one.py": ""})
    assert check_package(repository.root, "mcore-tensor").findings == []
    repository.write({f"{folder}/two.py": "def f(): ...\n"})
    assert _kinds(check_package(repository.root, "mcore-tensor")) == [("PARAMETER_REMOVED", "f")]


def test_names_that_are_imported_when_used_are_public(repository: SampleRepository) -> None:
    folder = "packages/mcore-tensor/src/mcore/tensor"
    repository.write({f"{folder}/one.py": "def f(a): ...\n"})
    before = '__all__ = ["f"]\nfrom mcore.tensor.one import f\n'
    after = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from mcore.tensor.one import f\n"
        '__all__ = ["f"]\n'
        "if not TYPE_CHECKING:\n    def __getattr__(name): ...\n"
    )
    assert _after(repository, before, after).findings == []
    repository.write({f"{folder}/one.py": "def f(): ...\n"})
    assert _kinds(check_package(repository.root, "mcore-tensor")) == [("PARAMETER_REMOVED", "f")]


def test_public_modules_below_the_package(repository: SampleRepository) -> None:
    folder = "packages/mcore-tensor/src/mcore/tensor"
    named = '__all__ = ["config"]\nfrom mcore.tensor import config\n'
    files = {
        f"{folder}/config.py": "FLAG = 1\ndef set_flag(a): ...\n",
        f"{folder}/disk/__init__.py": '__all__ = ["save"]\ndef save(a): ...\n',
        f"{folder}/hidden.py": '__all__ = ["h"]\ndef h(a): ...\n',
        f"{folder}/listed.py": "def t(a): ...\n",
    }
    repository.write(files)
    repository.add_package("mcore-tensor", version="1.0.0", code=named)
    table = "packages/mcore-tensor/pyproject.toml"
    text = repository.read(table)
    repository.write({table: f'{text}\n[tool.mcore]\npublic-modules = ["listed"]\n'})
    repository.commit("mcore-tensor-v1.0.0")
    repository.write({path: code.replace("(a)", "()") for path, code in files.items()})
    outcome = check_package(repository.root, "mcore-tensor")
    assert sorted(path for _, path in _kinds(outcome)) == [
        "config.set_flag",
        "disk.save",
        "listed.t",
    ]


@pytest.mark.parametrize("given", ["removal_version=V", "V", "*V", "**V", "removal_version=2"])
def test_a_removal_version_has_to_be_a_literal(repository: SampleRepository, given: str) -> None:
    after = f'{MARKS}V = "2.0.0"\n@deprecated("1.0.1", {given})\ndef f(): ...\n'
    outcome = _after(repository, "def f(): ...\n", after, "2.0.0")
    assert (outcome.status, _kinds(outcome)) == (1, [("NON_LITERAL", "f")])


def test_dependants_have_to_look_at_a_break(repository: SampleRepository) -> None:
    repository.add_package("mcore-parallel", needs=("mcore-tensor>=0.1,<0.3",))
    outcome = _after(repository, "def f(a): ...\n", "", "0.2.0", old_version="0.1.0")
    assert outcome.status == 1
    assert [one.kind for one in outcome.findings] == ["OBJECT_REMOVED", "DEPENDANT_RANGE"]
    assert outcome.findings[1].path == "mcore-parallel"
    for revisited in ("mcore-tensor>=0.1,<0.2", "mcore-tensor>=0.2,<0.3"):
        repository.add_package("mcore-parallel", needs=(revisited,))
        assert check_package(repository.root, "mcore-tensor").status == 0
