"""The front page: its program does what it shows, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

from page_programs import run_by_sleeps
from rank_testing.programs import run_program

README = Path(__file__).resolve().parents[1] / "README.md"


def front_page_program(arguments: list[str]) -> int:
    """Run the page's Python block."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    run_by_sleeps(code, str(README))
    return 0


def test_the_program_prints_what_the_page_shows() -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    ended = run_program(front_page_program, [], 4)
    assert ended.exit_codes == [0, 0, 0, 0]
    assert ended.stdout == shown


def test_the_page_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 110
