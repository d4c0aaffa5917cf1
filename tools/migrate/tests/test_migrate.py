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
from mcore_migrate.differences import _WITHOUT_NOTE, GROUP_PLACES, is_group
from mcore_migrate.files import Result, read, written
from mcore_migrate.rewrite import rewrite
from mcore_migrate.scan import scan
from mcore_migrate.table import Table, read_table
from monorepo.isolation.venv import build

TABLE = read_table()
HERE = Path(__file__).parents[1]

# A source, what a person would make of it if it changes, notes, and names that stay.
CASES = {
    name: dict(part.split("\n", 1) for part in f"before\n{body.strip()}\n".split("--- "))
    for name, _, body in (
        case.partition("\n")
        for case in Path(__file__).with_name("cases.txt").read_text().split("=== ")[1:]
    )
}


@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_source_is_what_a_person_would_write(case: str) -> None:
    before = CASES[case]["before"]
    after = CASES[case].get("becomes", before)
    done, look = rewrite(before.encode(), TABLE), scan(before.encode(), TABLE, "")
    assert done.source.decode() == after
    assert bool(done.moved) == (after != before)
    notes = [f"{n.line}: {n.name}: {'left: ' * n.is_left}{n.text}" for n in done.notes]
    assert notes == CASES[case].get("notes", "").splitlines()
    assert sorted(done.stays | look.stays) == CASES[case].get("stays", "").splitlines()
    assert rewrite(after.encode(), TABLE).source.decode() == after


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


def test_every_name_of_the_page_is_found_where_it_is_sent() -> None:
    for path, home in TABLE.homes.items():
        source = f"from {path.rpartition('.')[0]} import {home.name}\n"
        done = rewrite(source.encode(), TABLE)
        assert done.source.decode() == f"from {home.module} import {home.name}\n"
        assert done.moved == {home}
        assert hasattr(importlib.import_module(home.module), home.name)


def test_every_row_of_the_page_names_the_public_place() -> None:
    """Rows that the table would not read, rows that are there twice, and private detours."""
    page = (HERE.parent / "docs/migration.md").read_text(encoding="utf-8")
    moved, _, checks = page.partition("## Calls to check")
    rows = [line for line in moved.splitlines() if line.startswith("| `")]
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
    checked = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in checks.splitlines()[5:]]
    assert {name for names in checked for name in names} == {
        home.name for home in TABLE.homes.values() if home.positional is not None or home.difference
    }


def test_what_is_said_about_arguments_holds_for_the_packages() -> None:
    homes = {home.name: home for home in TABLE.homes.values()}
    for name, home in homes.items():
        if home.positional is None:
            continue
        kinds = [one.kind for one in parameters(home).values()]
        assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == home.positional, name
        assert set(kinds) & {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}, name
    for name in {one.name for one in homes.values() if one.absent_group} - {*_WITHOUT_NOTE}:
        there = parameters(homes[name])
        groups = [one for one in there.values() if is_group(one.name)]
        places = [[*there].index(g.name) for g in groups if g.kind is g.POSITIONAL_OR_KEYWORD]
        assert places == ([GROUP_PLACES[name]] if name in GROUP_PLACES else []), name
        assert groups or "kwargs" in there or "options" in there, name


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
    assert "moves: MegatronModule, divide, get_pg_size" in printed


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

    def write_interrupted(result: Result) -> Result:
        if result.path.name == names[1]:
            signal.raise_signal(signal.SIGINT)  # delivered once the file is written
        return written(result)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" lets tests ignore it
    monkeypatch.setattr("mcore_migrate.__main__.written", write_interrupted)
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
