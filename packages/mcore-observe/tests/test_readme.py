import json
import re
from pathlib import Path

import pytest

import mcore.observe
from rank_testing import preload
from rank_testing.programs import run_program

preload("mcore.observe", "mlflow.store.tracking.sqlalchemy_store", "torch.utils.tensorboard")
README = Path(__file__).parents[1] / "README.md"


def example_under(heading: str) -> str:
    section = README.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def test_the_detectors_example_runs(capsys):
    mcore.observe.StragglerDetector.reset_singleton()
    try:
        exec(compile(example_under("Find a slow rank"), str(README), "exec"), {})
        report = mcore.observe.StragglerDetector().last_report
    finally:
        mcore.observe.StragglerDetector.reset_singleton()
    assert report.sections["compute"][0].count == 10
    assert report.sections["optimizer"][0].sum_ms >= 10
    assert capsys.readouterr().out == f"{report.identify_stragglers()}\n"


def logging_example(arguments):
    """The README's program."""
    exec(compile(example_under("Log a run"), str(README), "exec"), {"__name__": "__main__"})
    return 0


@pytest.mark.slow
@pytest.mark.needs("mlflow", "tensorboard")
def test_the_example_runs_on_two_ranks_and_prints_what_it_says(tmp_path):
    done = run_program(logging_example, [], 2, timeout_s=300)
    assert done.exit_codes == [0, 0], done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(" [")]
    assert len(lines) == 2, done.stdout
    expected = shown_line().replace("          40", "          80").replace("     8 |", "    16 |")
    assert without_times(lines[0]) == without_times(expected)
    text = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    assert [(line["step"], line["samples vs steps"]) for line in written] == [(5, 80), (10, 160)]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("runs").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert [(m.step, m.value) for m in history] == [
        (5, pytest.approx(0.4)),
        (10, pytest.approx(0.2)),
    ]
    assert list((tmp_path / "runs" / "first" / "tensorboard").glob("events*"))
    assert not (tmp_path / "runs" / "first" / "spool").exists()


def shown_line():
    """The line that the page shows, which is wrapped there."""
    shown = re.search(r"^ (\[2026.*?\|)\n```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return " " + shown[1].replace("\n", "")


def without_times(line):
    return re.sub(r"\[.{19}\]|(?:ms|samples/s): [\d.,]+", "", line)


def test_the_page_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
