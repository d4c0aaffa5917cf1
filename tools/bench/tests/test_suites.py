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
from bench.running import run_suites, suite_names

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
    "lonely": """
        def run():
            import no_such_peer.utils
            yield
    """,
    "failing": """
        from bench.measure import Row
        def run():
            yield Row("before", 1.0, "peer", 2.0)
            raise ZeroDivisionError("in the suite")
    """,
    "broken": """
        import mcore.no_such_part
        def run():
            return []
    """,
}


@pytest.fixture
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


@pytest.mark.usefixtures("suites")
def test_everything_that_can_happen_to_a_suite() -> None:
    assert suite_names() == sorted(SUITES)
    results = {result.suite: result for result in run_suites(sorted(SUITES))}
    assert [row.case for row in results["good"].rows] == ["fast"]
    assert not results["good"].failed
    assert results["disagreeing"].failed
    assert results["lonely"].missing == "no_such_peer"
    assert not results["lonely"].failed
    assert [row.case for row in results["failing"].rows] == ["before"]
    assert "ZeroDivisionError: in the suite" in results["failing"].error
    assert "mcore.no_such_part" in results["broken"].error
    assert results["broken"].missing == ""


@pytest.mark.usefixtures("suites")
@pytest.mark.parametrize(
    ("arguments", "expected", "printed"),
    [
        (["good"], 0, "fast  1 s   2 s, peer      2.00   1.5"),
        (["good", "lonely"], 0, "`hatch run bench lonely`"),
        (["lonely"], 2, "'no_such_peer', which is not installed"),
        (["good", "disagreeing"], 1, "DISAGREES: 3 against 4"),
        (["failing"], 1, "ZeroDivisionError: in the suite"),
        ([], 1, "\ngood, 0 s, load average "),
        (["nothing", "good"], 2, "no suite nothing. Available: broken, disagreeing"),
        (["--list"], 0, "suites: broken, disagreeing, failing, good, lonely"),
        (["--output", "page.md"], 2, "name the file with --results"),
        (["--page", "good"], 2, "--page measures no suite"),
        (["--page", "--results", "results.jsonl"], 2, "--page measures no suite"),
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
FAILING = {
    **GOOD, "suite": "failing", "when": "2026-10-01 12:00 UTC",
    "machine": {**MACHINE, "torch": "2.11"},
    "rows": [{**ROW, "target": 4.0, "note": "far"}, {**ROW, "target": None}],
}  # fmt: skip
SECTIONS = """\
Python: CPython 3.11

## failing

failing

2026-10-01 12:00 UTC, 62 s, load average 0.1 before and 1.2 after, torch: 2.11.

| case | here | compared with | ratio | aim | checked first | note |
|---|---|---|---|---|---|---|
| a\\|b | 2 us | 6 us, numpy 2.1 | 3.00 | 4, missed | equal | far |
| a\\|b | 2 us | 6 us, numpy 2.1 | 3.00 | | equal | |

## good

Title of ``good``.

2026-11-01 12:00 UTC, 62 s, load average 0.1 before and 1.2 after, torch: 2.13.

| case | here | compared with | ratio | aim | checked first |
|---|---|---|---|---|---|
| a\\|b | 2 us | 6 us, numpy 2.1 | 3.00 | 2 | equal |

- A remark.
"""


def written(path: Path, *suites: object) -> list[str]:
    """Write a results file. Returns the options that name it and a page next to it."""
    path.write_text("".join(json.dumps(suite) + "\n" for suite in suites))
    return ["--results", str(path), "--output", str(path.with_suffix(".md"))]


@pytest.mark.usefixtures("suites")
def test_page_of_results(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    options = written(file, GOOD, FAILING)
    before = file.read_text()
    assert program.main([*options, "--page"]) == 0
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# Benchmarks\n\nBoth sides ")
    assert text.partition("(benchmarks.jsonl).\n\n")[2] == SECTIONS
    assert file.read_text() == before


@pytest.mark.usefixtures("suites")
def test_suite_measured_again_replaces_its_own_rows_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    options = written(file, GOOD, FAILING)
    failing = json.dumps(FAILING)
    assert program.main([*options, "good", "failing", "lonely", "disagreeing"]) == 1
    told = capsys.readouterr().err
    for name in ("failing", "lonely", "disagreeing"):
        assert f"results.jsonl keeps the earlier results of {name}" in told
    lines = file.read_text().splitlines()
    assert lines[0] == failing
    assert [json.loads(line)["suite"] for line in lines] == ["failing", "good"]
    kept = read_results(file)["good"]
    assert kept.rows == [Row("fast", 1.0, "peer", 2.0, 1.5)]
    assert "megatron-core" in kept.machine
    assert kept.when > "2026-11-01"
    assert (tmp_path / "results.md").read_text() == page(read_results(file))
    names = sorted(path.name for path in tmp_path.glob("*results*"))
    assert names == ["results.jsonl", "results.md"]


@pytest.mark.usefixtures("suites")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (json.dumps(GOOD)[:-9], "line 2 is no result"),
        (json.dumps({**GOOD, "format": 2}), "its format is 2, and this version reads and writes 1"),
        ('{"\xe9": 1}', "line 2 is no result"),
        ("", "line 2 is no result"),
        (json.dumps({**GOOD, "rows": []}), "line 2 is no result"),
        (json.dumps({**GOOD, "rows": [{**ROW, "ours_s": "fast"}]}), "line 2 is no result"),
        (json.dumps({**GOOD, "rows": [{**ROW, "speed": 1}]}), "'speed'"),
        (json.dumps({**GOOD, "suite": "gone"}), "there is no suite 'gone'"),
    ],
)
def test_file_that_is_damaged_or_of_another_version_is_left_alone(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    options = written(file, FAILING)
    content = file.read_text() + line + "\n"
    file.write_text(content, encoding="latin-1")
    for arguments in ([*options, "good"], [*options, "--page"]):
        assert program.main(arguments) == 2
        captured = capsys.readouterr()
        assert str(file) in captured.err
        assert said in captured.err
        assert "Correct the file or name another one" in captured.err
        assert "load average" not in captured.out  # nothing was measured
    assert file.read_text(encoding="latin-1") == content
    assert not (tmp_path / "results.md").exists()


@pytest.mark.usefixtures("suites")
def test_folder_in_place_of_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = written(tmp_path / "results.jsonl", GOOD)
    (tmp_path / "results.md").mkdir()
    for arguments in (options, ["--results", str(tmp_path)]):
        assert program.main([*arguments, "good"]) == 2
        captured = capsys.readouterr()
        assert "Is a directory" in captured.err
        assert "load average" not in captured.out
    assert sorted(path.name for path in tmp_path.glob("*results*")) == [
        "results.jsonl",
        "results.md",
    ]


def test_page_of_the_repository_shows_its_results() -> None:
    results = read_results(program.RESULTS)
    assert sorted(results) == suite_names()
    assert program.PAGE.read_text() == page(results), "write it with hatch run bench --page"
