"""Rewritten sources, held to what a person would have written; and what is left alone."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mcore_migrate.__main__ import main
from mcore_migrate.differences import _GROUPS, POSITIONAL
from mcore_migrate.files import Result, read, written
from mcore_migrate.rewrite import rewrite
from mcore_migrate.scan import scan
from mcore_migrate.table import Table, read_table
from monorepo.isolation.venv import build

TABLE = read_table()
HERE = Path(__file__).parents[1]

# Each before, and what a person would write.
CASES = {
    "under another name": (
        "from megatron.core.utils import divide as d  # why\n",
        "from mcore.tensor import divide as d  # why\n",
    ),
    "what stays comes first": (
        "from megatron.core.utils import divide, other, get_pg_size\n",
        "from megatron.core.utils import other\n"
        "from mcore.parallel import get_pg_size\n"
        "from mcore.tensor import divide\n",
    ),
    "in parentheses": (
        "from megatron.core.utils import (\n    divide,\n    other,\n    WrappedTensor\n)\n",
        "from megatron.core.utils import (\n    other\n)\n"
        "from mcore.tensor import (\n    divide,\n    WrappedTensor\n)\n",
    ),
    "comments among names that move together": (
        "from megatron.core.utils import (\n    divide,  # a\n    # b\n    WrappedTensor\n)\n",
        "from mcore.tensor import (\n    divide,  # a\n    # b\n    WrappedTensor\n)\n",
    ),
    "comments for linters": (
        "from megatron.core.utils import divide, get_pg_size  # noqa: F401\n",
        "from mcore.parallel import get_pg_size  # noqa: F401\n"
        "from mcore.tensor import divide  # noqa: F401\n",
    ),
    "other spellings of a module": (
        "from megatron_fsdp.utils import FSDPDistributedIndex\n"
        "from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_mesh_names\n",
        "from mcore.parallel import FSDPDistributedIndex\n"
        "from mcore.parallel import get_mesh_names\n",
    ),
    "for type checkers": (
        "if TYPE_CHECKING:\n\tfrom megatron.core.utils import (WrappedTensor,\n\t\tother)\n",
        "if TYPE_CHECKING:\n\tfrom megatron.core.utils import (other)\n"
        "\tfrom mcore.tensor import (WrappedTensor)\n",
    ),
    "several on a line": (
        "if x: from megatron.core.utils import divide, other; y = 1\n",
        "if x: from megatron.core.utils import other; from mcore.tensor import divide; y = 1\n",
    ),
    "a module": (
        "import megatron.core.utils as u\nu.divide(4, 2)\nu.divide.__name__\n",
        "import mcore.tensor as mcore_tensor\nmcore_tensor.divide(4, 2)\n"
        "mcore_tensor.divide.__name__\n",
    ),
    "a module that is still needed": (
        "import os, megatron.core.utils as u\nu.divide(4, 2)\nu.other\n",
        "import os, megatron.core.utils as u\nimport mcore.tensor as mcore_tensor\n"
        "mcore_tensor.divide(4, 2)\nu.other\n",
    ),
    "a module by its whole path": (
        "import megatron.core.utils\nimport megatron.core.other\nmegatron.core.utils.divide(4, 2)\n"
        "megatron.core.other.f()\n",
        "import mcore.tensor as mcore_tensor\nimport megatron.core.other\n"
        "mcore_tensor.divide(4, 2)\nmegatron.core.other.f()\n",
    ),
    "a module from its package, twice": (
        "from megatron.core import utils, models\nfrom megatron import core\nutils.divide\n"
        "core.utils.divide\nmodels.x\n",
        "from megatron.core import models\nimport mcore.tensor as mcore_tensor\n"
        "mcore_tensor.divide\nmcore_tensor.divide\nmodels.x\n",
    ),
    "a name that is taken": (
        "import megatron.core.utils as u\nmcore_tensor = u.divide(4, 2)\n",
        "import mcore.tensor as mcore_tensor_\nmcore_tensor = mcore_tensor_.divide(4, 2)\n",
    ),
    "in a function": (
        "def f():\n    import megatron.core.utils as u\n    return u.divide(4, 2)\n",
        "def f():\n    import mcore.tensor as mcore_tensor\n    return mcore_tensor.divide(4, 2)\n",
    ),
    "patches": (
        "@mock.patch('megatron.core.utils.divide', None)\n"
        "@mock.patch(new=1, target='megatron.core.utils.divide')\n"
        '@patch.object(x, "megatron.core.utils.divide")\n'
        "def f(monkeypatch):\n"
        '    monkeypatch.setattr("megatron.core.utils.GlobalMemoryBuffer.get", 1)\n',
        "@mock.patch('mcore.tensor.divide', None)\n"
        "@mock.patch(new=1, target='mcore.tensor.divide')\n"
        '@patch.object(x, "megatron.core.utils.divide")\n'
        'def f(monkeypatch):\n    monkeypatch.setattr("mcore.tensor.GlobalMemoryBuffer.get", 1)\n',
    ),
    "a module that is an attribute of a class": (
        "class A:\n    from megatron.core import utils\n    x = utils.divide(4, 2)\n"
        "A.utils.divide\n",
        "class A:\n    from megatron.core import utils\n    import mcore.tensor as mcore_tensor\n"
        "    x = mcore_tensor.divide(4, 2)\nA.utils.divide\n",
    ),
    "a module that is re-exported under its own name": (
        "from megatron.core import utils as utils\nutils.divide\n",
        "from megatron.core import utils as utils\nimport mcore.tensor as mcore_tensor\n"
        "mcore_tensor.divide\n",
    ),
    "a comment behind an import that is needed no more": (
        "from megatron.core import utils  # a\nimport megatron.core.utils as u  # b\n"
        "utils.divide, u.divide\n",
        "import mcore.tensor as mcore_tensor  # a\nimport mcore.tensor as mcore_tensor  # b\n"
        "mcore_tensor.divide, mcore_tensor.divide\n",
    ),
}
LEFT = {
    "a parameter of that name": "import megatron.core.utils as u\ndef f(u):\n    return u.divide\n",
    "relative": "from .utils import divide\nfrom megatron.core.utils import other\n",
    "comments among names": "from megatron.core.utils import (\n    divide,  # a\n    other\n)\n",
    "a text": "x = 'megatron.core.utils.divide'\nmock.patch('my.megatron.core.utils.divide')\n",
    "an unknown module": "from megatron.core.models import divide\nimport megatron.core.utils\n",
}
IMPORT = "import megatron.core.utils as u\n"
REBOUND = {
    "captured": "match x:\n    case {'k': u}: u.divide(4, 2)\n",
    "captured from a sequence": "match x:\n    case [_, *u]: u.divide(4, 2)\n",
    "captured from a mapping": "match x:\n    case {'k': 1, **u}: u.divide(4, 2)\n",
    "bound by a walrus": "[u := y for y in x]\nu.divide(4, 2)\n",
    "bound by an error": "try: f()\nexcept E as u: u.divide(4, 2)\n",
}


@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_source_is_what_a_person_would_write(case: str) -> None:
    before, after = CASES[case]
    assert rewrite(before.encode(), TABLE).source.decode() == after
    assert rewrite(after.encode(), TABLE).source.decode() == after


@pytest.mark.parametrize("case", LEFT)
def test_what_has_not_moved_is_left(case: str) -> None:
    assert rewrite(LEFT[case].encode(), TABLE).source.decode() == LEFT[case]


@pytest.mark.parametrize("case", REBOUND)
def test_a_name_that_may_be_something_else_is_left_and_told(case: str) -> None:
    source = IMPORT + REBOUND[case]
    done = rewrite(source.encode(), TABLE)
    assert done.source.decode() == source
    line = source[: source.index("u.divide(")].count("\n") + 1
    assert [(one.line, one.name, one.is_left) for one in done.notes] == [(line, "divide", True)]


def test_a_module_that_a_function_binds_globally_is_left_and_told() -> None:
    source = f"def f():\n    global u\n    {IMPORT}\ndef g():\n    return u.divide(4, 2)\n"
    done = rewrite(source.encode(), TABLE)
    assert done.source.decode() == source
    assert [(one.line, one.name, one.is_left) for one in done.notes] == [(6, "divide", True)]


def test_what_replaces_a_name_of_the_old_module_is_told() -> None:
    source = (
        "from megatron.core import utils\nmonkeypatch.setattr(utils, 'divide', f)\n"
        "with patch.object(utils, 'get_pg_size'): pass\nmonkeypatch.setattr(utils, 'other', f)\n"
        "utils.divide = f\ndel utils.divide\n"
    )
    notes = [(one.line, one.name, one.is_left) for one in rewrite(source.encode(), TABLE).notes]
    assert notes == [
        (2, "divide", True),
        (3, "get_pg_size", True),
        (5, "divide", False),
        (6, "divide", False),
    ]


def test_calls_that_always_differ_are_told() -> None:
    source = (
        "from megatron.core.utils import __straggler__ as s, local_multi_tensor_applier as apply\n"
        "from megatron.core.utils import unwrap_model, make_sharded_tensor_for_checkpoint as make\n"
        "from megatron_fsdp.utils import FSDPDistributedIndex as Index\n"
        "from megatron.core.utils import local_multi_tensor_scale\n"
        "s.configure(2, 0)\napply(scale, flag, [a, b], 2.0)\ns.report()\n"
        "unwrap_model(model)\nunwrap_model(model, (A, B))\nmake(t, 'k', tp_group=g)\n"
        "Index(m, 's', 'o', 't', h, True)\nIndex(m, 's', 'o', 't', h)\n"
        "local_multi_tensor_scale(1, f, [a, b], 2.0)\n"
    )
    notes = rewrite(source.encode(), TABLE).notes
    assert [one.line for one in notes] == [5, 6, 8, 10, 11, 13]
    assert "to_megatron_sharded_state_dict" in notes[3].text
    assert "differ in the last bit" in notes[5].text


def test_lines_are_those_of_the_file_as_it_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from megatron.core.utils import divide, get_pg_size\nfrom megatron.core import utils\n"
        "import megatron.core.utils as u\nget_pg_size()\nutils.divide, u.divide\n\n"
        "def f():\n    from megatron.core.utils import divide, other\n    return get_pg_size()\n"
    )
    for options, lines in (["--check"], [4, 9]), ([], [4, 10]):
        main([str(file), *options])
        told = [one for one in capsys.readouterr().out.splitlines() if "get_pg_size: no" in one]
        assert [int(one.split(":")[1]) for one in told] == lines
    written = file.read_text().splitlines()
    assert all("get_pg_size()" in written[line - 1] for line in lines)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ends", [False, True])
def test_everything_else_keeps_every_byte(newline: bytes, mark: bytes, ends: bool) -> None:
    lines = [b"x = 1", b"if y: pass  ", b"", b"# \xc3\xa9", b"f( 1,2 )"]
    old = b"from megatron.core.utils import divide"
    text = mark + newline.join([*lines, b"%s", *lines]) + newline * ends
    before, after = text % old, text % b"from mcore.tensor import divide"
    assert rewrite(before, TABLE).source == after


def test_calls_that_mean_something_else_are_told_with_their_lines() -> None:
    source = (
        "from megatron.core.utils import *\n"
        "from megatron.core.utils import get_pg_size as size, is_torch_min_version, divide\n"
        "from megatron.core.utils import get_batch_on_this_cp_rank, StragglerDetector\n"
        "from megatron.bridge.training.utils.train_utils import training_log\n"
        "size()\nsize(None)\nsize(group)\nsize(**given)\n"
        "is_torch_min_version('2.1', check_equality=False)\nis_torch_min_version('2.1')\n"
        "get_batch_on_this_cp_rank(b, cp_group=g)\nb = get_batch_on_this_cp_rank(b, g)\n"
        "training_log(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, pg_collection=x)\n"
        "StragglerDetector()\ndivide(4, 2)\n"
        "try:\n    import megatron.core.utils as v\nexcept ImportError:\n    v = Fake()\n"
        "v.divide(4, 2)\nfor v in (v.divide, v.divide): pass\n"
        "patch('megatron.core.utils.' 'divide')\npatch(f'megatron.core.utils.divide{1}')\n"
        "patch.multiple('megatron.core.utils', divide=1)\npatch('megatron.core.utils.divide')\n"
        "import megatron.core.utils as w\ndef f(x: list['w.WrappedTensor']) -> 'w': ...\n"
    )
    notes = [(note.line, note.name, note.is_left) for note in rewrite(source.encode(), TABLE).notes]
    assert notes == [
        (1, "megatron.core.utils.*", True),
        (5, "get_pg_size", False),
        (6, "get_pg_size", False),
        (9, "is_torch_min_version", False),
        (11, "get_batch_on_this_cp_rank", False),
        (12, "get_batch_on_this_cp_rank", False),
        (13, "training_log", False),
        (14, "StragglerDetector", False),
        (20, "divide", True),
        (21, "divide", True),
        (22, "megatron.core.utils.divide", True),
        (23, "megatron.core.utils.divide", True),
        (24, "megatron.core.utils", True),
        (25, "divide", False),
        (27, "WrappedTensor", True),
    ]


def test_what_no_package_has_is_named() -> None:
    source = (
        "from megatron.core.utils import other, divide\nfrom megatron.core import utils, models\n"
        "utils.more()\nutils.divide(4, 2)\n"
    )
    found = rewrite(source.encode(), TABLE).stays | scan(source.encode(), TABLE, "").stays
    assert found == {"megatron.core.utils.other", "megatron.core.utils.more"}


def test_every_name_of_the_page_is_found_where_it_is_sent() -> None:
    for path, home in TABLE.homes.items():
        source = f"from {path.rpartition('.')[0]} import {home.name}\n"
        done = rewrite(source.encode(), TABLE)
        assert done.source.decode() == f"from {home.module} import {home.name}\n"
        assert done.packages == {home.package}
        assert hasattr(importlib.import_module(home.module), home.name)


def test_every_row_of_the_page_names_the_public_place() -> None:
    """Rows that the table would not read, rows that are there twice, and private detours."""
    page = (HERE.parent / "docs/migration.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    found = [
        re.match(r"\| `(\w+)` \| `[\w.]+(?:`, `[\w.]+)*` \| `([\w.]+)` \| [\w., -]+ \|", row)
        for row in rows
    ]
    assert [row for row, match in zip(rows, found, strict=True) if match is None] == []
    places = [match.groups() for match in found if match]
    assert len(places) == len(set(places))
    for name, module in places:
        package = ".".join(module.split(".")[:2])
        is_public = name in importlib.import_module(package).__all__
        assert (module == package) if is_public else name.startswith("_"), name
    assert {match[1] for match in found if match} == {home.name for home in TABLE.homes.values()}


def test_what_is_said_about_arguments_holds_for_the_packages() -> None:
    homes = {home.name: home for home in TABLE.homes.values()}
    for name, most in POSITIONAL.items():
        kinds = [one.kind for one in parameters(homes[name]).values()]
        assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == most, name
        assert set(kinds) & {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}, name
    for name, (place, groups) in _GROUPS.items():
        there = list(parameters(homes[name]))
        assert homes[name].absent_group
        assert place is None or there[place] in groups, name
        assert place is not None or "kwargs" in there or "options" in there or groups[0] in there


def parameters(home: object) -> dict[str, inspect.Parameter]:
    found = getattr(importlib.import_module(home.module), home.name)
    return dict(inspect.signature(found).parameters)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files as people have them: one to rewrite, one broken, some that are nobody's business."""
    root = tmp_path / "src"
    for folder in (".git", "venv/lib", "sub"):
        (root / folder).mkdir(parents=True)
    (root / "venv/pyvenv.cfg").touch()
    old = "from megatron.core.utils import divide, get_pg_size\nget_pg_size()\n"
    for name in (".git/a.py", "venv/lib/a.py", "sub/a.py", "notes.txt"):
        (root / name).write_text(old)
    (root / "broken.py").write_text("from megatron.core.utils import divide\nx = = 1\n")
    (root / "plain.py").write_text("x = = megatron\n")  # not Python, and no matter of ours
    (root / "sub/a.py").chmod(0o750)
    (root / "link.py").symlink_to("sub/a.py")
    (root / "round.py").symlink_to("round.py")
    (root / "sub/up").symlink_to("..")
    outside = root.parent / "outside.py"
    outside.write_text(old)
    (root / "outside.py").symlink_to(outside)
    os.mkfifo(root / "pipe.py")
    return root


def contents(root: Path) -> dict[str, bytes]:
    files = (one for one in root.rglob("*") if os.path.isfile(one))
    return {str(one.relative_to(root)): one.read_bytes() for one in files}


def test_files_are_rewritten_in_their_place_and_the_rest_is_left(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    assert main([str(tree)]) == 2
    after = contents(tree)
    imports = b"from mcore.parallel import get_pg_size\nfrom mcore.tensor import divide\n"
    new = imports + b"get_pg_size()\n"
    assert after == {**before, "sub/a.py": new, "link.py": new}
    assert (tree / "link.py").is_symlink()
    assert b"megatron" in (tree.parent / "outside.py").read_bytes()
    assert stat.S_IMODE((tree / "sub/a.py").stat().st_mode) == 0o750
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{tree}/broken.py: is not Python that can be read: ")
    told = rf"{tree}/(link|sub/a).py:3: get_pg_size: no group is given, .*"
    assert re.fullmatch(told, printed[1])
    moves, install = "moves: divide, get_pg_size", "pip install mcore-parallel mcore-tensor"
    assert printed[2:] == ["1 file rewritten", moves, install]
    (tree / "broken.py").unlink()
    assert main([str(tree), "--check"]) == 0


def test_a_check_and_a_diff_write_nothing(
    tree: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tree / "broken.py").unlink()
    before = contents(tree)
    assert main([str(tree), "--check", "--json"]) == 1
    [file] = json.loads(capsysbinary.readouterr().out)["files"]
    assert (file["rewritten"], file["error"]) == (True, None)
    assert [one["line"] for one in file["notes"]] == [2]
    text = b"# coding: latin-1\r\n\x0c\nfrom megatron.core.utils import divide\r\nx = '\xe9\x85'"
    (tree / "sub/b.py").write_bytes(text)
    before = contents(tree)
    assert main(["--diff", str(tree / "sub")]) == 0
    assert contents(tree) == before
    printed = capsysbinary.readouterr()
    assert f"{tree}/sub/a.py:2:".encode() in printed.err
    place = shutil.copytree(tree / "sub", tree.parent / "copy", symlinks=True)
    patch = printed.out.replace(f"{tree.as_posix()[1:]}/sub/".encode(), b"")
    subprocess.run(["git", "apply", "-"], input=patch, cwd=place, check=True)
    assert main([str(tree)]) == 0
    for name in ("a.py", "b.py"):
        assert (place / name).read_bytes() == (tree / "sub" / name).read_bytes() != before


def test_what_changed_meanwhile_or_is_read_only_stays(tree: Path) -> None:
    file = tree / "sub/a.py"
    result = read(file, TABLE)
    assert result is not None
    file.chmod(0o444)
    assert written(result).error == "can't be written: it is read-only"
    file.chmod(0o644)
    file.write_text("from megatron.core.utils import divide  # newer\n")
    assert written(result).error == "is left: it has changed since it was read"
    assert file.read_text().endswith("# newer\n")
    file.unlink()
    assert written(result).error == "can't be written: No such file or directory"


def test_a_notebook_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "a.ipynb"
    book.write_text('{"cells": [{"source": [\n"from megatron.core.utils import divide\\n"]}]}')
    before = book.read_bytes()
    assert main([str(tmp_path)]) == 0
    assert book.read_bytes() == before
    told = capsys.readouterr().out
    assert told.startswith(f"{book}:2: megatron.core.utils: left as it is: notebooks are not")


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    """Files of a copy of Megatron, with relative imports."""
    root = tmp_path / "copy/megatron/core"
    for folder in ("models", "transformer"):
        (root / folder).mkdir(parents=True)
    (root / "models/a.py").write_text(
        "from..utils import divide, other\nfrom ..transformer import MegatronModule as M\n"
        "from .. import utils\nfrom . import b\nutils.get_pg_size()\ndivide(4, 2)\n"
    )
    (root / "transformer/__init__.py").write_text("from .module import MegatronModule\n")
    return root


def test_relative_imports_are_followed_in_a_copy_of_megatron(
    copied_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = copied_tree.parents[2] / "a.py"
    shutil.copy(copied_tree / "models/a.py", lone)
    assert main([str(lone.parent)]) == 0
    printed = capsys.readouterr().out
    assert (copied_tree / "models/a.py").read_text() == (
        "from..utils import other\nfrom mcore.tensor import divide\n"
        "from mcore.modules import MegatronModule as M\nimport mcore.parallel as mcore_parallel\n"
        "from . import b\nmcore_parallel.get_pg_size()\ndivide(4, 2)\n"
    )
    front = (copied_tree / "transformer/__init__.py").read_text()
    assert front == "from mcore.modules import MegatronModule\n"
    assert "a.py:6: get_pg_size: no group is given" in printed
    assert "2 relative imports left" in printed
    assert "moves: MegatronModule, divide" in printed


@pytest.mark.parametrize(
    "saver",
    [
        "from megatron.core import (\n    dist_checkpointing,\n)\n",
        "from megatron.core.distributed import DistributedDataParallel as D\n",
    ],
)
def test_entries_stay_in_a_tree_with_megatrons_checkpoints(
    saver: str, copied_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied_tree / "b.py").write_text(saver)
    assert main([str(copied_tree)]) == 0
    source = (copied_tree / "models/a.py").read_text()
    assert "from mcore.tensor import divide\nfrom ..transformer import MegatronModule" in source
    assert "b.py imports: MegatronModule. To move them" in capsys.readouterr().out
    (copied_tree / "c.py").write_text("from mcore.modules import to_megatron_sharded_state_dict\n")
    assert main([str(copied_tree)]) == 0
    assert "from mcore.modules import MegatronModule" in (copied_tree / "models/a.py").read_text()


def test_many_files_are_rewritten_by_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for number in range(40):
        (tmp_path / f"{number}.py").write_text("from megatron.core.utils import divide\n")
    assert main([str(tmp_path)]) == 0
    assert "[###############               ] 20 of 40 files" in capsys.readouterr().err
    new = "from mcore.tensor import divide\n"
    assert {one.read_text() for one in tmp_path.iterdir()} == {new}
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere")])


def test_the_wheel_has_the_page_and_runs_by_itself(tmp_path: Path, tree: Path) -> None:
    build(HERE, tmp_path / "wheel", "--wheel")
    [wheel] = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "mcore_migrate", "--check", str(tree / "sub")],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "pip install mcore-parallel mcore-tensor" in done.stdout
    assert not (tmp_path / "site" / "mcore_migrate" / "tests").exists()
    assert Table((tmp_path / "site/mcore_migrate/migration.md").read_text()).homes == TABLE.homes


def test_an_interrupt_tells_of_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("first.py", "second.py", "third.py")
    for name in names:
        (tmp_path / name).write_text("from megatron.core.utils import get_pg_size as n\nn()\n")

    def written_then_interrupted(result: Result) -> Result:
        done = written(result)
        if result.path.name == names[1]:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr("mcore_migrate.__main__.written", written_then_interrupted)
    assert main([str(tmp_path)]) == 130
    done, error = capsys.readouterr()
    assert [name for name in names if f"{name}:2: get_pg_size: no group" in done] == [*names[:2]]
    assert "2 files rewritten" in done
    assert error.startswith("interrupted after 2 rewritten files")
    assert "megatron" in (tmp_path / names[2]).read_text()


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from megatron.core.utils import divide\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mcore_migrate", "--check", str(tmp_path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
