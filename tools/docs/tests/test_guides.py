"""The programs and commands of the guides run, and print the output that the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from page_programs import run_by_sleeps
from rank_testing import preload
from rank_testing.programs import run_program
from rank_testing.scripts import run_script

preload(
    "mcore.observe", "mcore.modules.graphs", "mcore.parallel.checkpoint", "torch.distributed.fsdp"
)
PAGES = Path(__file__).parents[1] / "pages"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    """A Python block of a page.

    Attributes:
        code: Its text.
        ranks: The number of ranks in the torchrun command below it, or None without one.
        shown: The output that the page shows below it, or None.
    """

    code: str
    ranks: int | None
    shown: str | None


def programs(page: str) -> dict[str, Program]:
    """The programs of a page, by the names of their files."""
    blocks = _BLOCK.findall((PAGES / page).read_text(encoding="utf-8"))
    found = {}
    for place, (language, name, code) in enumerate(blocks):
        if language == "python":
            below = blocks[place + 1 :]
            launch = re.search(rf"nproc-per-node (\d+) {name}$", below[0][2] if below else "", re.M)
            after = [block for block in below[:2] if block[0] != "bash"][:1]
            shown = next((text for kind, _, text in after if kind in ("text", "console")), None)
            assert name not in ("", *found), f"{page}: a program needs a unique name"
            found[name] = Program(code, int(launch[1]) if launch else None, shown)
    return found


def commands(page: str) -> list[list[str]]:
    """The arguments of ``python -m`` in the shell blocks of a page, in order."""
    blocks = _BLOCK.findall((PAGES / page).read_text(encoding="utf-8"))
    lines = [line for kind, _, text in blocks if kind == "bash" for line in text.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python -m ")]


def on_ranks(arguments: list[str]) -> int:
    """Run a program of a page as one of its ranks."""
    page, name = arguments
    run_by_sleeps(programs(page)[name].code, name)
    return 0


@pytest.mark.parametrize(
    "page",
    sorted(
        page.relative_to(PAGES).as_posix()
        for page in PAGES.rglob("*.md")
        if "```python" in page.read_text(encoding="utf-8")
    ),
)
def test_programs_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = programs(page)
    assert found
    for name, program in found.items():
        if program.ranks is None:
            done = run_script(program.code)
            assert done.returncode == 0, f"{name}: {done.stderr}"
            printed = done.stdout
        else:
            ended = run_program(on_ranks, [page, name], program.ranks)
            assert ended.exit_codes == [0] * program.ranks, f"{name}: {ended.stderr}"
            printed = ended.stdout
        logged = [line for line in printed.splitlines(keepends=True) if line.startswith(" [20")]
        if program.shown is not None and program.shown.startswith(" [20"):  # one line of the log
            assert _without_numbers(logged[0]) == _without_numbers(program.shown), name
        else:
            said = "".join(line for line in printed.splitlines(keepends=True) if line not in logged)
            assert program.shown in (None, said), name
    for module, *words in commands(page):
        run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        done = run_script(f"import runpy, sys\nsys.argv[1:] = {words}\n{run}")
        assert done.returncode == int(words[0] == "diff"), f"{words}: {done.stderr}"  # it differs
        assert done.stdout or "--html" in words


def _without_numbers(line: str) -> str:
    return re.sub(r"[\d.,]+(E[+-]\d+)?", "", line)


def test_the_command_makes_the_change_that_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_migrate.__main__ import main as migrate  # here: ranks import this file, not libcst

    monkeypatch.chdir(tmp_path)
    blocks = _BLOCK.findall((PAGES / "guides/migrate.md").read_text(encoding="utf-8"))
    (diff,) = (text for language, _, text in blocks if language == "diff")
    end = next(text for language, _, text in blocks if language == "console")
    before = [line[1:] for line in diff.splitlines()[3:] if not line.startswith("+")]
    Path("train.py").write_text("\n".join(before) + "\n", encoding="utf-8")
    assert migrate(["--diff", "train.py"]) == 0
    assert tuple(capsys.readouterr()) == (diff, end)
