"""The page about runs: its data, its size, what it lets through, and how a browser shows it."""

import base64
import hashlib
import html.parser
import json
import math
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import Outlier
from mcore.observe.runs.run_page import draw_page, find_spikes, group_of, page_data, thinned
from mcore.observe.runs.tables import Run

EVIL = "</script><img src=x onerror=alert(1)><!--\u2028&'\""


class Parsed(html.parser.HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.policy = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.elements.append((tag, found))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def page_of(runs, folder):
    draw_page(runs, folder / "run.html")
    return (folder / "run.html").read_text()


def test_the_page_is_one_file_that_asks_for_nothing_and_lets_no_text_through(tmp_path):
    runs = [
        Run(EVIL, {EVIL: {1: 2.0, 2: 1.0}, "rank0/" + EVIL: {1: 1.0}, "rank1/" + EVIL: {1: 3.0}},
            settings={EVIL: EVIL}),
        Run("b", {"{{script}}": {1: 2.0, 2: math.nan, 3: -math.inf}}),
    ]  # fmt: skip
    text = page_of(runs, tmp_path)
    parsed = Parsed(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert not {"img", "link", "iframe", "object", "base"} & {tag for tag, _ in parsed.elements}
    asking = {"src", "href", "action"} & {name for _, each in parsed.elements for name in each}
    assert not asking
    assert not any(name.startswith("on") for _, each in parsed.elements for name in each)
    data, script = parsed.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in parsed.policy
    assert "default-src 'none'" in parsed.policy
    assert "innerHTML" not in script
    assert json.loads(data) == page_data(runs)
    assert json.loads(data)["runs"][0]["settings"] == {EVIL: EVIL}
    assert "{{script}}" in data
    assert list(tmp_path.iterdir()) == [tmp_path / "run.html"]
    page_of([], tmp_path)
    page_of([Run("empty")], tmp_path)


def test_data_of_a_run_from_its_files(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(
        '{"step": 1, "lm loss": 4.0, "batch-size": 8}\n'
        '{"step": 2, "lm loss": 2.0, "batch-size": 8}\n'
        '{"step": 3, "time": null, "lm loss": null, "batch-size": 8}\n'
        '{"step": 4, "time": 1000.5, "lm loss": 1.25, "odd": 7}\n'
        '{"step": 5, "time": 1003.5, "lm loss": 1.0}\n'
        f'{{"step": 6, "time": 1e300, "time/far": {"9" * 400}}}\n'
    )
    config = {"settings": {"lr": 0.1, "api_key": "hunter22"}, "corpus_crc32": 7}
    (path.parent / "config.json").write_text(json.dumps(config))
    data = page_data([Run.read(tmp_path / "run")])
    [run] = data["runs"]
    assert run["settings"] == {"lr": "0.1", "api_key": "***", "corpus_crc32": "7"}
    assert (run["steps"], run["began"], run["seconds"]) == ([1, 6], 1000.5, 3.0)
    assert run["figures"] == [("lm loss", 1.0, "last; least 1; NaN at 1 of 5 steps")]
    assert data["constants"] == {"batch-size": [8.0]}
    loss, far, odd = data["charts"]
    [curve] = far["curves"]
    assert (curve["x"], curve["y"], curve["nan"], curve["t"]) == ([6], [None], 1, [None])
    assert (loss["name"], loss["group"], loss["thinned"]) == ("lm loss", "Loss", False)
    [curve] = loss["curves"]
    assert curve["x"] == [1, 2, 3, 4, 5]
    assert curve["y"] == [4.0, 2.0, None, 1.25, 1.0]
    assert curve["t"] == [None, None, None, 0.0, 3.0]
    assert (odd["name"], odd["group"]) == ("odd", "Other")
    (path.parent / "config.json").write_text("[" * 100_000)
    assert Run.read(path).settings == {}


def test_metrics_belong_together_as_people_look_for_them():
    for name, group in (
        ("lm loss validation", "Loss"),
        ("loss-scale", "Gradients and learning rate"),
        ("grad-norm", "Gradients and learning rate"),
        ("throughput/tokens_per_sec", "Throughput"),
        ("mem-reserved-gigabytes", "Memory"),
        ("forward-backward-time", "Timers"),
        ("moe/load balancing", "Experts"),
        ("samples vs steps", "Other"),
    ):
        assert group_of(name) == group, name


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.floats(width=32), st.just(math.nan)), min_size=1, max_size=400),
    st.integers(8, 60),
)
def test_thinning_keeps_extremes_ends_and_gaps(values, most):
    points = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= max(most, 5)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert {step for step, _ in kept} <= set(range(len(values)))
    assert (kept[0][0], kept[-1][0]) == (0, len(values) - 1)
    finite = [value for value in values if math.isfinite(value)]
    shown = [value for _, value in kept if math.isfinite(value)]
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert any(map(math.isfinite, values)) == bool(shown)
    assert all(map(math.isfinite, values)) == (len(shown) == len(kept))


def test_ranks_become_maps_of_the_worst_and_the_page_stays_small(tmp_path):
    curves = {}
    for rank in range(300):
        times = dict.fromkeys(range(10, 5010, 10), 10.0)
        curves[f"straggler/rank{rank}/forward-ms"] = times
        curves[f"straggler/rank{rank}/relative-score"] = dict.fromkeys(times, 1.0)
    curves["straggler/rank7/forward-ms"] = curves["straggler/rank7/forward-ms"] | {2000: 40.0}
    curves["straggler/rank7/relative-score"] = {2000: 0.25}
    curves["memory of rank 0"] = {1: 1.0, 2: 2.0}  # of one rank alone: a curve
    curves["loss"] = {step: 1.0 / step for step in range(1, 100_001)} | {77_777: 50.0}
    curves |= {f"layer{at}/grad": {1: 1.0, 2: 2.0} for at in range(300)}
    run = Run("large", curves)
    data = page_data([run, run])
    forward, score = data["maps"][:2]
    assert forward["name"] == "straggler/rank*/forward-ms"
    assert (len(forward["ranks"]), len(forward["steps"]), forward["thinned"]) == (128, 240, True)
    assert {(len(row), max(row)) for row in forward["cells"]} == {(240, 10.0), (240, 40.0)}
    [row] = [at for at, row in enumerate(forward["cells"]) if 40.0 in row]
    first, last = map(int, forward["ranks"][row].split("-"))
    assert first <= 7 <= last
    assert score["lowIsBad"]
    assert min(cell for row in score["cells"] for cell in row if cell is not None) == 0.25
    assert len(data["maps"]) == 4
    assert [chart["name"] for chart in data["charts"]].count("memory of rank 0") == 1
    loss = next(chart for chart in data["charts"] if chart["name"] == "loss")
    assert loss["thinned"]
    assert [len(curve["x"]) <= 1000 and max(curve["y"]) for curve in loss["curves"]] == [50.0] * 2
    assert data["leftOut"] == {"charts": 302 - 240, "maps": 0}
    assert len(page_of([run, run], tmp_path)) < 2_000_000


def slow_one(rank, score, metric="forward", **more):
    found = {"host": f"node{rank // 8}", "value": 40.0, "median": 10.0, "z": 9.0, **more}
    return Outlier(metric, rank, score=score, device=f"cuda:{rank % 8}", **found)


def test_slow_ranks_are_a_strip_by_step_and_a_table_of_when_where_and_how_much(tmp_path):
    slow = {
        10: (),
        20: (slow_one(9, 0.5), slow_one(3, 0.8, "backward")),
        30: (slow_one(9, 0.25),),
        40: (),
        50: (slow_one(9, 0.4),),
        60: (slow_one(9, 0.9, "clock_mhz", value=900.0, median=1800.0),),
        70: (slow_one(2, math.nan, host=EVIL, value=30.0),),
    }
    times = {step: 1.7e9 + step for step in range(1, 71)}
    runs = [
        Run("calm", {"loss": {1: 2.0, 70: 1.0}}, slow={10: (), 20: ()}),
        Run("b", {"loss": {1: 2.0, 70: 1.0}}, times, slow=slow),
        Run("old", {"loss": {1: 2.0, 70: 1.0}}),
    ]
    data = page_data(runs)
    [strip] = data["maps"]
    assert (strip["name"], strip["run"], strip["ranks"]) == ("Slow ranks", 1, ["2", "3", "9"])
    assert strip["steps"] == ["10", "20", "30", "40", "50", "60", "70"]
    assert strip["cells"] == [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0],
        [1.0, 1.25, 1.0, 1.0, 1.0, 1.0, 1.0],
        [1.0, 2.0, 4.0, 1.0, 2.5, 2.0, 1.0],
    ]
    assert [run["figures"][-1] for run in data["runs"]] == [
        ("slow ranks", 0, "in 2 reports"),
        ("slow ranks", 3, "rank 9 in 4 of 7 reports"),
        ("loss", 1.0, "last; least 1"),
    ]
    text = page_of(runs, tmp_path)
    table = re.search(r'<div id="slow" class="wide"><table>(.*?)</table>', text, re.DOTALL)[1]
    rows = [re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", row) for row in table.split("</tr>")][
        :-1
    ]
    titles = ["run", "rank", "host", "device", "what", "worst", "reports", "steps", "since (UTC)"]
    since = [f"2023-11-14 22:{minutes}" for minutes in (13, 14, 14, 14)]
    assert rows == [
        titles,
        ["b", "9", "node1", "cuda:1", "forward", "4x", "3 of 7", "20-50", since[0]],
        ["b", "3", "node0", "cuda:3", "backward", "1.25x", "1 of 7", "20", since[0]],
        ["b", "9", "node1", "cuda:1", "clock_mhz", "2x", "1 of 7", "60", since[2]],
        ["b", "2", html.escape(EVIL), "cuda:2", "forward", "3x", "1 of 7", "70", since[3]],
    ]
    alone = page_of(runs[1:2], tmp_path)
    assert '<div id="slow" class="wide"><table><thead><tr><th scope="col">rank</th>' in alone
    calm = page_of(runs[:1], tmp_path)
    assert '<div id="slow" class="wide"></div>' in calm
    many = {
        step: tuple(slow_one(step % 500 + 4 * at, 0.5) for at in range(8))
        for step in range(1, 5000, 2)
    }
    text = page_of([Run("many", slow=many)], tmp_path)
    assert len(text) < 400_000
    assert text.count("<tr><td>") == 64
    assert "and 200 more" in text  # of 264 ranks
    [strip] = page_data([Run("many", slow=many)])["maps"]
    assert (len(strip["ranks"]), len(strip["steps"]), strip["thinned"]) == (128, 240, True)


def test_spikes_of_the_gradient_norm_by_hand():
    calm = [1.0, 1.2] * 10  # the median is 1.1 and the median deviation 0.1
    wide = [float(value) for value in range(1, 11)]  # 5.5 and 2.5
    for before, limit in ((calm, 2.2), (wide, 30.5), ([1.0] * 10, 2.0), ([0.0] * 10, 0.0)):
        for value, count in ((limit - 0.01, 0), (limit, 0), (limit + 0.01, 1)):
            points = list(enumerate([*before, math.nan, value, math.inf]))
            assert find_spikes(points) == [(len(before) + 1, value)] * count, (limit, value)
    assert find_spikes(list(enumerate([1.0] * 9 + [99.0]))) == []  # too few before it
    assert find_spikes(list(enumerate([9.0] * 60 + [1.0] * 26 + [9.0]))) == [(86, 9.0)]
    norms = dict.fromkeys(range(1, 5001), 1.0) | dict.fromkeys(range(100, 5000, 500), 9.0)
    data = page_data([Run("a", {"grad-norm": norms, "loss": norms})])
    steps = list(range(100, 5000, 500))
    loss, chart = data["charts"]
    assert loss["curves"][0]["spikes"] == []
    assert chart["curves"][0]["spikes"] == steps
    assert set(steps) <= set(chart["curves"][0]["x"])


# What a browser does when it is ready to is done at once.
AT_ONCE = """
window.requestAnimationFrame = (work) => work();
window.IntersectionObserver = class {
  constructor(work) { this.work = work; }
  observe(target) { this.work([{ target, isIntersecting: true }]); }
};
"""
# Presses and moves what a person would, and notes what the page shows then.
HANDS = """
const said = {}, figure = document.querySelector("#charts figure");
const seen = (what) => [...document.querySelectorAll(what)].filter((one) => one.offsetParent);
const read = () => figure.querySelector("output").textContent;
const press = (key) => figure.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const set = (id, value, event) => {
  const input = document.getElementById(id);
  if (input.type === "checkbox") input.checked = value; else input.value = value;
  input.dispatchEvent(new Event(event));
};
said.last = read();
press("Home");
said.first = read();
press("ArrowRight");
said.second = read();
set("smooth", "0.5", "input");
said.smooth = read();
set("smooth", "0", "input");
set("log", true, "change");
said.log = read();
set("axis", "time", "change");
press("End");
said.time = read();
document.querySelector("#legend input").click();
said.one = read();
const figures = [...document.querySelectorAll("figure")];
const strip = figures.find((one) => one.textContent.startsWith("Slow ranks"));
const drawing = strip.querySelector("canvas");
said.reds = [1, 3, 5].map((sixth) => {
  const x = 56 + (sixth / 6) * (drawing.clientWidth - 66);
  const scale = window.devicePixelRatio;
  const [red, , blue] = drawing.getContext("2d").getImageData(x * scale, 30 * scale, 1, 1).data;
  return red - blue;
});
said.table = seen("#slow td").map((one) => one.textContent);
set("find", "MS", "input");
said.shown = seen("#charts figure").map((one) => one.querySelector("figcaption").textContent);
said.differs = seen("#settings-table tbody tr").map((one) => one.textContent);
said.wide = document.documentElement.scrollWidth <= window.innerWidth;
said.evil = document.querySelectorAll("img").length;
document.body.replaceChildren(JSON.stringify(said));
"""


def use_page(runs, hands, tmp_path, chromium):
    """Return the notes of the hands that use the page in a browser."""
    text = page_of(runs, tmp_path)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page = tmp_path / "hands.html"
    text = text.replace("<head>", f"<head><script>{AT_ONCE}</script>")
    page.write_text(text.replace("</body>", f"<script>{hands}</script></body>"), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [chromium, *flags, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    body = re.search(r"<body[^>]*>(\{.*\})\s*</body>", done.stdout, re.DOTALL)
    assert body, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(body[1]))


def test_a_browser_shows_the_values_by_keyboard_and_switches(tmp_path, chromium):
    runs = [
        Run(
            name,
            {"lm loss": {1: 4.0 * at, 2: 2.0 * at}}
            | {metric: {1: 1.0, 2: 5.0} for metric in ("rank0 ms", "rank1 ms", EVIL)},
            {1: 100.0, 2: 400.0},
            {"lr": str(at), "same": "1"},
            {1: (), 2: (slow_one(0, 0.8),), 3: (slow_one(0, 0.01, host=EVIL),)} if at == 2 else {},
        )
        for at, name in ((1, "a"), (2, EVIL))
    ]
    said = use_page(runs, HANDS, tmp_path, chromium)
    assert said["last"] == f"a, step 22{EVIL}, step 24"
    assert said["first"] == f"a, step 14{EVIL}, step 18"
    assert said["second"] == said["last"]
    assert said["smooth"].startswith("a, step 22.6667")  # (4 / 4 + 2 / 2) / (1 / 4 + 1 / 2)
    assert said["log"] == said["last"]
    assert said["time"] == f"a, 5 min2{EVIL}, 5 min4"
    assert said["one"] == f"{EVIL}, 5 min4"
    calm, slower, slowest = said["reds"]  # also where another report is far worse
    assert calm + 60 < slower < slowest
    assert said["table"][:6] == [EVIL, "0", "node0", "cuda:0", "forward", "1.25x"]
    assert said["table"][11] == EVIL
    assert said["shown"] == ["rank* ms (a)", f"rank* ms ({EVIL})"]
    assert said["differs"] == ["lr12"]
    assert (said["wide"], said["evil"]) == (True, 0)


EYES = """
const said = {};
for (const figure of document.querySelectorAll("#charts figure")) {
  const canvas = figure.querySelector("canvas"), ink = (part) => {
    const probe = document.createElement("canvas").getContext("2d");
    const style = getComputedStyle(document.documentElement);
    probe.fillStyle = style.getPropertyValue(`--c${part}`);
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].join();
  };
  const top = canvas.getContext("2d").getImageData(0, 0, canvas.width, 6).data;
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const has = (data, wanted) => {
    let at = 0;
    while (at < data.length && data.slice(at, at + 4).join() !== wanted) at += 4;
    return at < data.length;
  };
  said[figure.querySelector("figcaption").textContent] = [
    figure.querySelector("output").textContent,
    [0, 1].map((part) => has(all, ink(part))),
    has(top, ink(0)),
  ];
}
document.body.replaceChildren(JSON.stringify(said));
"""


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("lm loss", "lm loss validation"),
        ("loss", "eval_loss"),
        ("train/loss", "val/loss"),
        ("loss/training", "loss/valid"),
    ],
)
def test_a_browser_shows_both_losses_and_the_spikes(first, second, order, tmp_path, chromium):
    norms = dict.fromkeys(range(1, 31), 1.0) | {15: 9.0, 20: 8.0}
    losses = {first: dict.fromkeys(range(1, 31), 2.0) | {1: 5.0}, second: {10: 4.5, 30: 2.5}}
    others = {"aux loss": {1: 1.0, 30: 3.0}, "grad-norm": norms}
    run = Run("a", {name: losses[name] for name in (first, second)[::order]} | others)
    both = f"{first}, step 302{second}, step 302.5"
    assert use_page([run], EYES, tmp_path, chromium) == {
        f"{first}, {second}": [both, [True, True], False],
        "aux loss": ["step 303", [True, False], False],
        "grad-norm (2 spikes: steps 15, 20)": ["step 301", [True, False], True],
    }
