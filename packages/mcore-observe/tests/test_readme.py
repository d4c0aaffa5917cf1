import json
import re
from pathlib import Path

import mcore.observe

README = Path(__file__).parents[1] / "README.md"


def example_under(heading: str) -> str:
    section = README.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def test_the_detectors_example_runs(capsys):
    mcore.observe.StragglerDetector.reset_singleton()
    try:
        exec(compile(example_under("Who is slow"), str(README), "exec"), {})
        report = mcore.observe.StragglerDetector().last_report
    finally:
        mcore.observe.StragglerDetector.reset_singleton()
    assert report.sections["compute"][0].count == 10
    assert report.sections["optimizer"][0].sum_ms >= 10
    assert capsys.readouterr().out == f"{report.identify_stragglers()}\n"


def test_the_example_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    text = README.read_text()
    code = example_under("A run that logs")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    (shown,) = [line for line in text.splitlines() if line.startswith(" [2026")]
    changing = re.compile(r"\[.{19}\]|\(ms\): [\d.]+")
    assert changing.sub("", lines[0]) == changing.sub("", shown)
    written = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == list(range(1, 11))
    assert written[3]["lm loss"] == 0.5


def test_every_name_it_lists_is_there():
    table = README.read_text().split("## What is where")[1].split("##")[0]
    names = set(re.findall(r"`(\w+)`", table))
    assert names <= set(mcore.observe.__all__)
    assert len(names) > 20
