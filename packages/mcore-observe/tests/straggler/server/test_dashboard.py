"""The dashboard and the alert rules, against what a running controller says on ``/metrics``."""

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from mcore.observe import Outlier, SectionStats, StragglerReport
from mcore.observe.straggler.server.controller import StragglerController
from mcore.observe.straggler.server.routes import ControllerState

FOLDER = Path(__file__).parents[3] / "docs" / "prometheus"
OF_THE_SCRAPE = {"job", "instance"}
SELECTOR = re.compile(r"\b(mcore_straggler_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"\s*')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


@pytest.fixture(scope="module")
def labels_of():
    """The labels of each metric that a controller has after a report, by the names of samples."""
    numbers = dict.fromkeys(
        ("elapsed_ms", "data_ms", "temp_c", "power_w", "util_pct", "clock_mhz", "etpt_tf"), (1.0,)
    )
    stats = {"compute": (SectionStats(1, 1.0, 1.0, 1.0),)}
    found = (Outlier("compute", 0, "node", 2.0, 1.0, 9.0, 0.5),)
    report = StragglerReport(
        1.0, 1, 1, 1.0, ("node",), numbers, stats, {"compute": (1.0,)}, {"compute": (1.0,)},
        outliers=found, stragglers=found,
    )  # fmt: skip
    state = ControllerState(rank=0, world_size=1, enabled=True)
    state.show({"lm loss": 2.0})
    compared = SimpleNamespace(unix_time=1.0, report=report, places=[("node", "cpu")])
    vars(compared).update(by_rank=lambda: torch.zeros(7, 1), section_names=(), stragglers=())
    compared.is_measuring, compared.to_prometheus = False, report.to_prometheus
    state.applied(True, compared)
    controller = StragglerController(
        state, bind="127.0.0.1", port=0, token=None, allow_get_toggle=False
    )
    try:
        address = "http://{}:{}/metrics".format(*controller.address)
        text = urllib.request.urlopen(address, timeout=300).read().decode()
    finally:
        controller.close()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def dashboard():
    return json.loads((FOLDER / "dashboard.json").read_text())


def dashboard_expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def rule_expressions():
    return re.findall(r"^ +expr: (.+)$", (FOLDER / "alerts.yml").read_text(), re.MULTILINE)


def problems(expression, labels_of):
    """What is wrong with the names in an expression."""
    if any(expression.count(a) != expression.count(b) for a, b in ("()", "[]", "{}")):
        yield f"brackets of {expression}"
    known = set(OF_THE_SCRAPE)
    for name, matchers in SELECTOR.findall(expression):
        if name not in labels_of:
            yield f"no metric {name}"
            continue
        known |= labels_of[name]
        for matcher in filter(None, matchers.split(",")):
            label = MATCHER.fullmatch(matcher)
            if label is None or label[1] not in labels_of[name] | OF_THE_SCRAPE:
                yield f"{name} has no label for {matcher}"
    for group in GROUPING.findall(expression):
        for label in filter(None, re.split(r"[\s,]+", group)):
            if label not in known:
                yield f"no label {label} in {expression}"


def test_every_metric_and_label_is_one_of_the_controller(labels_of):
    expressions = [*dashboard_expressions(), *rule_expressions()]
    assert len(expressions) > 25
    assert [found for one in expressions for found in problems(one, labels_of)] == []
    used = {name for one in expressions for name, _ in SELECTOR.findall(one)}
    assert used == set(labels_of)  # nothing that the controller says is left out
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            [first, *_] = SELECTOR.findall(target["expr"])
            assert shown <= labels_of[first[0]] | OF_THE_SCRAPE, target
    for variable in dashboard()["templating"]["list"]:
        for name in re.findall(r"mcore_straggler_\w+", variable.get("definition", "")):
            assert name in labels_of


def test_the_check_of_names_finds_what_is_wrong():
    labels = {"mcore_straggler_a": {"rank"}}
    for expression, said in (
        ("mcore_straggler_b", "no metric mcore_straggler_b"),
        ('mcore_straggler_a{host="x"}', 'mcore_straggler_a has no label for host="x"'),
        ("max by (host) (mcore_straggler_a)", "no label host in"),
        ("max(mcore_straggler_a", "brackets of"),
    ):
        [found] = problems(expression, labels)
        assert said in found
    assert not list(problems('max by (rank, job) (mcore_straggler_a{rank=~"$r"})', labels))


def test_panels_have_ids_places_and_titles_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({p["title"] for p in panels})
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    sources = {panel["datasource"]["uid"] for panel in panels}
    assert sources == {"${datasource}"}  # whichever the reader has


@pytest.mark.needs("promtool")
def test_promtool_takes_the_rules_and_every_expression(tmp_path):
    rules = [
        f"      - record: dashboard:{number}\n        expr: {json.dumps(expression)}\n"
        for number, expression in enumerate(dashboard_expressions())
    ]
    text = "groups:\n  - name: dashboard\n    rules:\n" + "".join(rules)
    (tmp_path / "dashboard.yml").write_text(text)
    for words in (
        ["check", "rules", str(FOLDER / "alerts.yml"), str(tmp_path / "dashboard.yml")],
        ["test", "rules", str(FOLDER / "alerts_test.yml")],
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
