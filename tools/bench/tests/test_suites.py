"""Tests of the command: running suites, the journal of their results, and its page."""

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench.suites
from bench import __main__ as program
from bench.measure import Row
from bench.record import page, read_results

SUITES = {
    "good": """
        '''Title of ``good``.

        - A remark.
        '''
        from bench.measure import Row
        def run():
            yield Row("fast", 1.0, "peer", 2.0, target=1.5)
    """,
    "disagreeing": """
        from bench.measure import Row
        def run():
            yield Row.disagreement("sum", "peer", "3 against 4")
    """,
    "lonely": "import no_such_peer.utils",
    "failing": """
        from bench.measure import Row
        def run():
            yield Row("before", 1.0, "peer", 2.0)
            raise ZeroDivisionError("in the suite")
    """,
    "broken": "import mcore.no_such_part",
}


@pytest.fixture(autouse=True)
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one suite for everything that can happen."""
    package = tmp_path / "planted_suites"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in SUITES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench.suites, "__path__", [str(package)])
    monkeypatch.setattr(bench.suites, "__name__", "planted_suites")
    yield
    for name in [name for name in sys.modules if name.startswith("planted_suites")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "expected", "printed"),
    [
        (["good"], 0, "fast  1 s   2 s, peer      2.00   1.5"),
        (["good", "lonely"], 0, "`hatch run bench lonely`"),
        (["lonely"], 2, "'no_such_peer', which is not installed"),
        (["good", "disagreeing"], 1, "DISAGREES: 3 against 4"),
        (["failing"], 1, "before  1 s"),
        (["broken"], 1, "No module named 'mcore.no_such_part'"),
        ([], 1, "\ngood, 0 s, load average "),
        (["nothing", "good"], 2, "no suite nothing. Available: broken, disagreeing"),
        (["--page", "good"], 2, "--page measures no suite"),
    ],
)
def test_exit_codes_and_reports(
    arguments: list[str], expected: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == expected
    assert printed in "".join(capsys.readouterr())


MACHINE = {"Python": "CPython 3.11", "torch": "2.13"}
ROW = {
    "case": "a|b", "ours_s": 2e-6, "peer": "numpy 2.1", "peer_s": 6e-6, "target": 2.0,
    "agreement": "equal", "note": "",
}  # fmt: skip
GOOD = {
    "format": 1, "suite": "good", "when": "2026-11-01 12:00 UTC", "seconds": 61.7,
    "load": ["0.1", "1.2"], "machine": MACHINE, "rows": [ROW],
}  # fmt: skip
FAILING = {**GOOD, "suite": "failing"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A journal with results of two suites."""
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(FAILING)}\n")
    return path


def run(file: Path, *arguments: str) -> int:
    return program.main(["--results", str(file), *arguments])


def test_a_new_measurement_replaces_only_the_rows_of_its_suite(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(file, "good", "failing", "lonely", "disagreeing") == 1
    printed = capsys.readouterr().err
    for name in ("failing", "lonely", "disagreeing"):
        assert f"results.jsonl keeps the earlier results of {name}" in printed
    lines = file.read_text().splitlines()
    assert lines[0] == json.dumps(FAILING)
    assert [json.loads(line)["suite"] for line in lines] == ["failing", "good"]
    kept = read_results(file)["good"]
    assert kept.rows == [Row("fast", 1.0, "peer", 2.0, 1.5)]
    assert "megatron-core" in kept.machine
    assert kept.when > "2026-11-01"
    assert file.with_suffix(".md").read_text() == page(read_results(file))
    assert {path.name for path in file.parent.glob("*results*")} == {"results.jsonl", "results.md"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(GOOD)[:-9], "line 3 is no result"),
        (json.dumps({**GOOD, "format": 2}), "its format is 2, and this version reads and writes 1"),
        (json.dumps({**GOOD, "rows": [{**ROW, "speed": 1}]}), "'speed'"),
        (json.dumps({**GOOD, "suite": "gone"}), "there is no suite 'gone'"),
    ],
)
def test_a_damaged_journal_is_not_changed(
    line: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = file.read_text() + line + "\n"
    file.write_text(content)
    for suite in ("good", "--page"):
        assert run(file, suite) == 2
        captured = capsys.readouterr()
        for text in (str(file), message, "Correct the file or name another one"):
            assert text in captured.err
        assert "load average" not in captured.out  # nothing was measured
    assert file.read_text() == content
    assert not file.with_suffix(".md").exists()
