"""What the page keeps and shows of a job, beside numpy."""

import base64
import itertools
import json
import math
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe.straggler.server.page_answers import PageAnswers
from mcore.observe.straggler.server.page_history import MOST_BYTES, History
from mcore.observe.straggler.server.routes import ControllerState, Router

NAN = math.nan
NAMES = ("elapsed_ms", "data_ms", "temp_c", "power_w", "util_pct", "clock_mhz", "etpt_tf")
LOW_IS_BAD = {"util_pct", "clock_mhz", "etpt_tf"}


def decoded(found):
    """The cells of an answer, ``[reports, rows]``, computed as the page does."""
    codes = np.frombuffer(base64.b64decode(found["codes"]), dtype="<u2")
    codes = codes.reshape(len(found["times"]), found["rows"]).astype(float)
    low, high = (np.array(found[end], dtype=float)[:, None] for end in ("low", "high"))
    return np.where(codes == 0, NAN, low + (codes - 1) / 65534 * (high - low))


def by_numpy(values, group, how, is_low_bad):
    """Rows of ranks, ``[reports, rows]``, rank by rank."""
    ends = [values[:, at : at + group] for at in range(0, values.shape[1], group)]
    if how == "median":  # of two middle ones the lower, as torch has it
        of_each = [np.nanquantile(end, 0.5, axis=1, method="lower") for end in ends]
    else:
        of_each = [(np.nanmin if is_low_bad else np.nanmax)(end, axis=1) for end in ends]
    return np.stack(of_each, axis=1)


def ask(history, query="", **status):
    return json.loads(PageAnswers(history).data(query, status))


@settings(deadline=None, max_examples=60)
@given(
    world=st.integers(1, 40),
    reports=st.integers(1, 6),
    rows=st.integers(1, 12),
    metric=st.integers(0, 8),
    how=st.sampled_from(["worst", "median"]),
    unknown=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_rows_and_spread_are_those_of_numpy(
    simulated_job, world, reports, rows, metric, how, unknown, seed, data
):
    random = np.random.default_rng(seed)
    values = random.lognormal(3, 0.5, (reports, 9, world))
    values[random.random(values.shape) < unknown] = NAN
    history, job = History(), simulated_job(world)
    for number, of_report in enumerate(values):
        metrics, sums = torch.tensor(of_report[:7]), torch.tensor(of_report[7:] * 10)
        history.add(job.report(metrics, sums, unix_time=number))
    metric = min(metric, 7)  # seven metrics, and the section "data"
    own = values[:, 8 if metric == 7 else metric]
    first = data.draw(st.integers(0, world - 1))
    end = data.draw(st.integers(first + 1, world))
    query = f"metric={metric}&rows={rows}&how={how}&first={first}&end={end}"
    answer = ask(history, query)
    assert [one["name"] for one in answer["metrics"]] == [*NAMES, "data"]
    found = answer["map"]
    group = found["group"]
    assert math.ceil((end - first) / group) == found["rows"] <= rows
    assert group == 1 or math.ceil((end - first) / (group // 2)) > rows
    is_low_bad = answer["metrics"][metric]["name"] in LOW_IS_BAD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy: nothing but NaN
        expected = by_numpy(own[:, first:end], group, how, is_low_bad)
        spread = {"mean": np.nanmean, "sd": np.nanstd, "min": np.nanmin, "max": np.nanmax}
        of_all = {name: function(own, axis=1) for name, function in spread.items()}
    low, high = (np.array(found[end], dtype=float)[:, None] for end in ("low", "high"))
    half_a_step = 0.55 * (high - low) / 65534
    shown = decoded(found)
    # Not isclose, whose tolerance is one number in old versions of NumPy.
    is_near = abs(shown - expected) <= np.nan_to_num(half_a_step) + 1e-5 * abs(expected)
    assert (is_near | (np.isnan(shown) & np.isnan(expected))).all()
    for name, numbers in of_all.items():
        shown = np.array(found["spread"][name], dtype=float)
        np.testing.assert_allclose(shown, numbers, rtol=1e-4, atol=1e-4)


def elapsed(*values):
    return torch.tensor([values, *[[NAN] * len(values)] * 6], dtype=torch.float64)


def test_only_new_reports_are_sent_and_old_ones_go(simulated_job):
    history, job = History(most_reports=4), simulated_job(2)
    assert "map" not in ask(history)
    for number in range(6):
        history.add(job.report(elapsed(10.0 + number, 20.0), unix_time=100.0 + number))
    answer = ask(history)
    assert answer["oldest"] == answer["map"]["first_report"] == 2
    assert answer["map"]["times"] == [102, 103, 104, 105]
    assert decoded(answer["map"])[:, 0].tolist() == [12, 13, 14, 15]
    later = ask(history, "since=5")
    assert later["map"]["first_report"] == 5
    assert decoded(later["map"]).tolist() == [[15, 20]]
    assert "hosts" not in later
    assert ask(history, "since=6")["map"]["times"] == []
    assert (answer["every_s"], answer["epoch"]) == (1.0, later["epoch"])
    assert 0 <= answer["age_s"] < 600


def test_slow_ranks_have_a_place_and_a_beginning_and_an_end(simulated_job):
    history, job = History(), simulated_job(16)
    answers = PageAnswers(history)

    def report(number, slow_ms):
        times = [100.0] * 16
        times[9] = slow_ms
        history.add(job.report(elapsed(*times), unix_time=float(number)))
        return json.loads(answers.data("", {}))

    for number in range(8):
        measuring = {"count": 0, "ranks": [], "measuring": number < 4}
        assert report(number, 100.0)["slow"] == measuring
    seen = [report(number, 400.0) for number in range(8, 12)]
    [slow] = seen[-1]["slow"]["ranks"]
    place = {"rank": 9, "host": "node001", "device": "cuda:1"}
    assert place.items() <= slow.items()
    [sign] = slow["signs"]
    assert (sign["metric"], sign["value"], sign["median"]) == (0, 400, 100)
    first = next(one["slow"]["ranks"][0] for one in seen if one["slow"]["count"])
    assert slow["since"] == first["since"] in (8.0, 9.0, 10.0)
    over = [report(number, 100.0) for number in range(12, 17)][-1]
    assert over["slow"]["count"] == 0
    [episode] = over["recovered"]
    assert {**place, "since": slow["since"]}.items() <= episode.items()
    assert 12 <= episode["until"] <= 16


def test_of_two_ranks_the_slow_one_is_held_against_the_other(simulated_job):
    """As its own panel and ``mcore-straggler`` do: a mean of both would halve what is wrong."""
    history, job = History(), simulated_job(2)
    for number in range(12):
        history.add(job.report(elapsed(100, 400), unix_time=float(number)))
    [slow] = json.loads(PageAnswers(history).data("", {}))["slow"]["ranks"]
    [sign] = slow["signs"]
    assert (sign["value"], sign["median"]) == (400, 100)


def test_a_ranks_line_and_the_worst_rank_of_a_row(simulated_job):
    history, job = History(), simulated_job(8, hosts=["<b>"] * 8)
    answers = PageAnswers(history)
    with pytest.raises(ValueError, match="no report yet"):
        answers.rank("rank=0")
    history.add(job.report(elapsed(*range(8)), unix_time=1.0))
    history.add(job.report(elapsed(*range(8, 0, -1)), unix_time=2.0))
    line = json.loads(answers.rank("rank=3"))
    assert (line["host"], line["device"], line["rank"]) == ("<b>", "cuda:3", 3)
    assert (line["first_report"], line["values"]) == (0, [3, 5])
    assert line["latest"][:2] == [[5, 4], [None, None]]
    assert json.loads(answers.rank("first=2&end=6&report=0"))["rank"] == 5
    assert json.loads(answers.rank("first=2&end=6&report=1"))["rank"] == 2
    assert json.loads(answers.rank("first=2&end=6&metric=5"))["rank"] == 2  # nobody knows


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("metric=8", "metric must be a whole number from 0 to 7"),
        ("metric=-1", "metric"),
        ("metric=1e3", "metric"),
        ("metric=", None),
        ("rows=0", "rows must be a whole number from 1 to 512"),
        ("rows=513", "rows"),
        ("first=4", "first must be a whole number from 0 to 3"),
        ("first=2&end=2", "end must be a whole number from 3 to 4"),
        ("end=5", "end"),
        ("how=best", "how must be worst or median"),
        ("since=" + "9" * 400, "since"),
        ("since=%D9%A3", "since"),
        ("since=\u0663", "since"),
    ],
)
def test_other_queries_are_refused_with_a_hint(simulated_job, query, named):
    state = ControllerState(rank=0, world_size=4, enabled=True)
    router = Router(state, token=None, allow_get_toggle=False)
    state.applied(True, simulated_job(4).report(elapsed(1, 2, 3, 4)))
    answer = router.answer("GET", "/ui/data", query)
    assert answer.status == (200 if named is None else 400)
    if named is not None:
        assert named in json.loads(answer.body)["error"]
        assert query.partition("=")[2] not in ("", *json.loads(answer.body)["error"].split())
    assert router.answer("GET", "/ui/rank", "rank=4").status == 400
    assert router.answer("GET", "/ui/rank", "rank=3").status == 200


def test_the_training_s_numbers_cover_the_whole_run_in_few_points():
    history = History()
    for step in range(10_000):
        history.show({"lm loss": float(step), **{f"x{n}": 1.0 for n in range(step % 100)}})
    history.show({"lm loss": NAN})
    shown = ask(history)["scalars"]
    assert (len(shown), shown[0]["name"], shown[0]["value"]) == (32, "lm loss", None)
    points = shown[0]["points"]
    assert 120 <= len(points) <= 240
    assert points[0] == 0
    assert points[-1] > 9800
    assert {round(b - a) for a, b in itertools.pairwise(points)} == {64}


def test_memory_and_answers_stay_bounded_with_4096_ranks(simulated_job):
    """500 reports of 16 metrics fit; an answer is far below 1 MB."""
    job = simulated_job(4096, [f"section{number}" for number in range(8)])
    random = torch.Generator().manual_seed(0)
    metrics = torch.rand(7, 4096, dtype=torch.float64, generator=random) + 10
    found = job.report(metrics, torch.rand(10, 4096, dtype=torch.float64, generator=random))
    assert found.by_rank().shape == (16, 4096)
    assert MOST_BYTES // found.by_rank().nbytes >= 500
    small = History(most_bytes=4 * found.by_rank().nbytes)
    ours = tracemalloc.Filter(True, "*straggler*")  # and nothing of other threads
    tracemalloc.start()
    for _ in range(12):
        small.add(found)
    assert small.num_kept == 4
    traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
    python_bytes = sum(trace.size for trace in traces)
    tracemalloc.stop()
    assert python_bytes < 2**20  # beside the tensors: places, names
    history = History()
    for _ in range(520):
        history.add(found)
    text = PageAnswers(history).data("rows=512", {})
    answer = json.loads(text)
    assert (history.num_kept, answer["map"]["rows"], answer["map"]["group"]) == (500, 512, 8)
    assert len(text) < 800_000
