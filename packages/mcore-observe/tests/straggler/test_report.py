import dataclasses
import json
import math
import random
import re

import pytest
import torch

from mcore.observe import Outlier, SectionStats, StragglerReport, _StragglerData, _ValueWithRank
from mcore.observe.straggler.exchange import METRICS, GatheredRows, encode_row
from mcore.observe.straggler.outliers import PastReports, outlier_lines
from mcore.observe.straggler.report import RankComparison
from mcore.observe.straggler.reporter import etpt_tf, report_lines
from mcore.observe.straggler.sections import section_hash
from mcore.observe.straggler.verdict import OutlierRule

NAN = math.nan
NAMES = ("compute", "data")


def rows_of(metrics, names=NAMES, stats=None, **header):
    """One row a rank; ``metrics`` has seven numbers for each."""
    header = {"enabled": True, "wanted": True, "log_interval": 10, "total_flops": 1e12, **header}
    return torch.stack(
        [
            encode_row(
                section_hash(names),
                (stats[rank] if stats else {0: SectionStats(1, seven[0], seven[0], seven[0])}),
                len(names),
                metrics=seven,
                **header,
            )
            for rank, seven in enumerate(metrics)
        ]
    )


def compared(rows, names=NAMES, ranks=None, past=None, rule=None):
    ranks = ranks or tuple(range(len(rows)))
    return RankComparison(
        GatheredRows(rows, ranks, torch.tensor(ranks).argsort()),
        unix_time=1.7e9,
        hosts=tuple(f"node{rank // 2}" for rank in ranks),
        devices=tuple(f"cuda:{rank % 2}" for rank in ranks),
        names=names,
        past=past or PastReports(names, rule=rule),
    )


def report_of(rows, names=NAMES, **kwargs):
    return compared(rows, names, **kwargs).report


def elapsed_report(*elapsed_ms, **kwargs):
    return report_of(rows_of([(ms, NAN, NAN, NAN, NAN, NAN, 1.0) for ms in elapsed_ms]), **kwargs)


def test_throughput():
    assert round(etpt_tf(1e12, 10.0, world=1, amp=3.0), 2) == 33.33
    assert etpt_tf(4.8e13, 100.0, world=4, amp=3.0) == 40.0
    assert etpt_tf(1e12, 0.0, world=1, amp=3.0) == 0.0


def test_a_slow_rank_stands_out_from_the_faster_half():
    [outlier] = elapsed_report(100, 101, 99, 100, 150).outliers
    assert outlier.metric == "elapsed_ms"
    assert (outlier.rank, outlier.host, outlier.value, outlier.median) == (4, "node2", 150.0, 100.0)
    assert outlier.device == "cuda:0"
    fast = (math.log(99) + math.log(100)) / 2  # 5 % of noise for it, and as much for two others
    assert outlier.z == pytest.approx((math.log(150) - fast) / (0.05 * math.sqrt(1.5)), rel=1e-4)
    assert round(outlier.score, 2) == 0.66
    assert elapsed_report(10, 10, 10, 10).outliers == ()
    assert elapsed_report(10, 10, 10, 11).outliers == ()
    assert elapsed_report(100, 101, 99, 100, 150, rule=OutlierRule(z=9.0)).outliers == ()
    assert elapsed_report(0, 0, 0, 0).outliers == ()
    assert elapsed_report(0, 0, 0, 0, 5).outliers == ()


@pytest.mark.parametrize("world", [2, 4, 7, 64])
def test_half_of_the_ranks_may_be_slow(world):
    slow = world // 2
    report = elapsed_report(*[20.0] * slow, *[10.0] * (world - slow))
    assert sorted(outlier.rank for outlier in report.outliers) == list(range(slow))


def test_outliers_on_the_bad_side_only():
    usual = [10.0, 5.0, 60.0, 400.0, 99.0, 1980.0, 30.0]
    for column, change, stands_out in [
        (0, 20.0, True), (0, 1.0, False), (1, 20.0, False), (1, 1.0, False),
        (2, 95.0, True), (2, 20.0, False), (3, 700.0, False), (3, 10.0, False),
        (4, 30.0, True), (4, 150.0, False), (5, 1200.0, True), (5, 2900.0, False),
        (6, 1.0, False),
    ]:  # fmt: skip
        rows = [list(usual) for _ in range(8)]
        rows[5][column] = change
        outliers = report_of(rows_of(rows)).outliers
        assert [outlier.rank for outlier in outliers] == ([5] if stands_out else [])


def test_values_that_are_not_finite_take_no_part():
    [outlier] = elapsed_report(100, NAN, 101, 99, math.inf, 150).outliers
    assert (outlier.rank, outlier.median) == (5, 100.5)
    assert elapsed_report(NAN, NAN, NAN, NAN).outliers == ()
    smallest, largest = elapsed_report(NAN, 3.0, NAN, 2.0).min_max("elapsed_ms")
    assert (smallest(), largest()) == ((2.0, 3, "ms"), (3.0, 1, "ms"))


def test_scores():
    past = PastReports(NAMES)
    first = elapsed_report(10.0, 10.1, 9.9, 15.0, past=past)
    scores = first.relative_scores["compute"]
    assert [round(score, 3) for score in scores] == [0.99, 0.98, 1.0, 0.66]
    assert first.individual_scores["compute"] == (1.0,) * 4
    second = elapsed_report(20.0, 10.1, NAN, 7.5, past=past)
    assert second.individual_scores["compute"][:2] == (0.5, 1.0)
    assert math.isnan(second.relative_scores["compute"][2])
    assert second.individual_scores["compute"][3] == 1.0
    third = elapsed_report(10.0, 10.1, 9.9, 15.0, past=past)
    assert third.individual_scores["compute"] == (1.0, 1.0, 1.0, 0.5)
    assert second.identify_stragglers() == {
        "relative": {"compute": (0, 1)},
        "individual": {"compute": (0,)},
    }
    assert second.identify_stragglers(relative=0.3, individual=0.9)["relative"]["compute"] == ()


def test_sections_have_statistics_and_scores():
    names = ("compute", "data", "attention")
    stats = [
        {0: SectionStats(2, 8.0, 4.0, 5.0), 2: SectionStats(4, 4.0, 1.0, 2.0)},
        {0: SectionStats(2, 8.0, 4.0, 5.0), 1: SectionStats(1, 3.0, 3.0, 3.0),
         2: SectionStats(4, 16.0, 2.0, 3.0)},
    ]  # fmt: skip
    report = report_of(rows_of([(8.0, *(NAN,) * 6)] * 2, names, stats), names)
    assert list(report.sections) == list(names)
    assert report.sections["attention"] == (stats[0][2], stats[1][2])
    assert report.sections["data"][1] == stats[1][1]
    assert report.sections["data"][0].count == 0
    assert math.isnan(report.sections["data"][0].median_ms)
    assert report.relative_scores == {"compute": (1.0, 1.0), "attention": (1.0, 0.5)}
    assert [(o.metric, o.rank, o.value, o.score) for o in report.outliers] == [
        ("attention", 1, 1.6, 0.5)
    ]


def test_the_lowest_rank_wins_ties():
    report = elapsed_report(20.0, 48.0, 20.0, 48.0)
    assert [str(extreme) for extreme in report.min_max("elapsed_ms")] == ["20.00ms/0", "48.00ms/1"]
    assert [str(extreme) for extreme in report.min_max("power_w")] == ["nanW/-1", "nanW/-1"]
    permuted = elapsed_report(20.0, 48.0, 20.0, 48.0, ranks=(3, 2, 1, 0))
    assert [str(extreme) for extreme in permuted.min_max("elapsed_ms")] == [
        "20.00ms/1",
        "48.00ms/0",
    ]
    with pytest.raises(ValueError, match="metric is 'speed'"):
        report.min_max("speed")


def test_ranks_are_the_ones_that_were_given():
    rows = rows_of([(ms, *(NAN,) * 6) for ms in (30.0, 10.0, 10.0, 10.0)])
    rows[:, 12] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    report = report_of(rows, ranks=(2, 3, 0, 1))
    assert report.metrics["elapsed_ms"] == (30.0, 10.0, 10.0, 10.0)
    assert report.log_interval == 3
    assert [outlier.rank for outlier in report.outliers] == [2]
    assert report.identify_stragglers()["relative"]["compute"] == (2,)


LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
    r"( \| M[nx]\w+/Rnk: (nan|-?\d+\.\d\d)(ms|W|C|%|MHz|TF)/-?\d+){14}"
)


def test_log_lines():
    etpt = (19.8, 20.0, 19.9, 8.33)
    elapsed = (20.5, 20.0, 20.2, 48.0)
    rows = rows_of(
        [(ms, NAN, 60.0, 400.0, 99.0, 1980.0, tf) for ms, tf in zip(elapsed, etpt, strict=True)]
    )
    first, bottom, top = report_lines(compared(rows), num_ranks=2)
    assert LINE.fullmatch(first)
    assert first.split(" | ")[1:] == [
        "MnRtt/Rnk: 20.00ms/1",
        "MxRtt/Rnk: 48.00ms/3",
        "MnPwr/Rnk: 400.00W/0",
        "MxPwr/Rnk: 400.00W/0",
        "MnTmp/Rnk: 60.00C/0",
        "MxTmp/Rnk: 60.00C/0",
        "MnUtl/Rnk: 99.00%/0",
        "MxUtl/Rnk: 99.00%/0",
        "MnClk/Rnk: 1980.00MHz/0",
        "MxClk/Rnk: 1980.00MHz/0",
        "MnDRtt/Rnk: nanms/-1",
        "MxDRtt/Rnk: nanms/-1",
        "MnEtpt/Rnk: 8.33TF/3",
        "MxEtpt/Rnk: 20.00TF/1",
    ]
    assert bottom == "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 8.33/3, 19.80/0,"
    assert top == "^^^^ Top    2 Ranks with highest Etpt(TF): 19.90/2, 20.00/1,"
    for num_ranks in (1, 4, 5):
        assert len(report_lines(compared(rows), num_ranks=num_ranks)) == 1


def test_throughput_ends_leave_out_the_unknown():
    rows = rows_of([(1.0, *(NAN,) * 5, tf) for tf in (3.0, NAN, 1.0, 3.0, 2.0)])
    report = report_of(rows, ranks=(4, 3, 2, 1, 0))
    assert report.throughput_ends(2) == ([(1.0, 2), (2.0, 0)], [(3.0, 1), (3.0, 4)])
    assert report.throughput_ends(9)[0] == [(1.0, 2), (2.0, 0), (3.0, 1), (3.0, 4)]


def test_outlier_lines_are_bounded():
    outliers = [Outlier("elapsed_ms", r, "h", 15.0, 10.05, 33.37, 0.66) for r in range(20)]
    lines = outlier_lines(outliers)
    assert lines[0] == (
        "straggler: rank 0 (host h) elapsed_ms=15.00ms median=10.05ms z=33.4 score=0.66"
    )
    assert len(lines) == 17
    assert lines[-1] == "\u2026 and 4 more"
    assert len(outlier_lines(outliers[:16])) == 16
    assert outlier_lines([]) == []


def test_worst_outlier_comes_first():
    report = elapsed_report(10, 10, 10, 10, 10, 14, 18)
    assert [outlier.rank for outlier in report.outliers] == [6, 5]


def test_straggler_data_of_a_report():
    rows = rows_of(
        [(20.0, 1.0, 60.0, NAN, 99.0, 1980.0, 8.0), (30.0, 2.0, 70.0, NAN, 98.0, 1.0, 5)]
    )
    data = compared(rows).data()
    assert (str(data.min_elapsed), str(data.max_elapsed)) == ("20.00ms/0", "30.00ms/1")
    assert (str(data.min_btime), str(data.max_btime)) == ("1.00ms/0", "2.00ms/1")
    assert (str(data.min_temp), str(data.max_temp)) == ("60.00C/0", "70.00C/1")
    assert (str(data.min_power), str(data.max_power)) == ("nanW/-1", "nanW/-1")
    assert (str(data.min_util), str(data.max_util)) == ("98.00%/1", "99.00%/0")
    assert (str(data.min_clock), str(data.max_clock)) == ("1.00MHz/1", "1980.00MHz/0")
    assert [value() for value in data.aflops] == [(5.0, 1, "TF"), (8.0, 0, "TF")]


def test_json_has_null_for_nan():
    report = elapsed_report(10.0, 20.0)
    read = json.loads(report.to_json())
    assert read == report.to_dict()
    assert read["metrics"]["elapsed_ms"] == [10.0, 20.0]
    assert read["metrics"]["power_w"] == [None, None]
    assert read["sections"]["compute"][1] == {
        "count": 1, "sum_ms": 20.0, "median_ms": 20.0, "max_ms": 20.0
    }  # fmt: skip
    assert read["outliers"][0]["metric"] == "elapsed_ms"
    assert read["stragglers"] == []
    assert read["hosts"] == ["node0", "node0"]
    assert read["devices"] == ["cuda:0", "cuda:1"]
    assert list(read)[:5] == ["unix_time", "world_size", "log_interval", "total_flops", "hosts"]


def test_replace_changes_one_field():
    report = elapsed_report(10.0, 20.0)
    later = dataclasses.replace(report, unix_time=1.8e9)
    assert (later.unix_time, report.unix_time) == (1.8e9, 1.7e9)
    assert later != report
    assert dataclasses.replace(later, unix_time=1.7e9) == report
    renamed = dataclasses.replace(report, hosts=("a", "b"))
    assert renamed.hosts == ("a", "b")
    assert renamed.metrics == report.metrics
    with pytest.raises(AttributeError):
        report.world_size = 3


def test_equal_reports_are_equal():
    """Also where a number is missing, which is no data in both."""
    rows = rows_of([(10.0, NAN, 60.0, NAN, NAN, NAN, 1.0), (NAN, 2.0, NAN, NAN, NAN, NAN, NAN)])
    report = report_of(rows)
    assert report == report_of(rows.clone())
    rows[1, 6] = 3.0
    assert report != report_of(rows)
    rows[1, 6] = math.inf
    assert report != report_of(rows)
    assert report != report.to_dict()
    other_rank = dataclasses.replace(report, local_sections={"x": SectionStats(1, 2.0, 2.0, 2.0)})
    assert report != other_rank


def test_dict_of_a_report_worked_out_by_hand():
    names = ("compute", "data", "mlp")
    stats = [
        {0: SectionStats(2, 40.0, 20.0, 21.0), 1: SectionStats(2, 4.0, 2.0, 3.0),
         2: SectionStats(4, 8.0, 2.0, 2.5)},
        {0: SectionStats(2, 80.0, 40.0, 41.0), 2: SectionStats(4, 8.0, 2.0, 2.5)},
    ]  # fmt: skip
    metrics = [
        (4.0, 3.0, 60.0, 400.0, 97.0, 1980.0, 12.5),
        (8.0, NAN, 61.0, NAN, 98.0, 1900.0, 6.25),
    ]
    report = report_of(rows_of(metrics, names, stats), names)
    seconds = ("count", "sum_ms", "median_ms", "max_ms")
    assert report.to_dict() == {
        "unix_time": 1.7e9,
        "world_size": 2,
        "log_interval": 10,
        "total_flops": 1e12,
        "hosts": ["node0", "node0"],
        "devices": ["cuda:0", "cuda:1"],
        "metrics": {
            "elapsed_ms": [4.0, 8.0],
            "data_ms": [3.0, None],
            "temp_c": [60.0, 61.0],
            "power_w": [400.0, None],
            "util_pct": [97.0, 98.0],
            "clock_mhz": [1980.0, 1900.0],
            "etpt_tf": [12.5, 6.25],
        },
        "sections": {
            "compute": [
                dict(zip(seconds, (2, 40.0, 20.0, 21.0), strict=True)),
                dict(zip(seconds, (2, 80.0, 40.0, 41.0), strict=True)),
            ],
            "data": [
                dict(zip(seconds, (2, 4.0, 2.0, 3.0), strict=True)),
                dict(zip(seconds, (0, 0.0, None, None), strict=True)),
            ],
            "mlp": [dict(zip(seconds, (4, 8.0, 2.0, 2.5), strict=True))] * 2,
        },
        "relative_scores": {"compute": [1.0, 0.5], "mlp": [1.0, 1.0]},
        "individual_scores": {"compute": [1.0, 1.0], "mlp": [1.0, 1.0]},
        "outliers": [
            {
                "metric": "elapsed_ms",
                "rank": 1,
                "host": "node0",
                "value": 8.0,
                "median": 6.0,
                "z": pytest.approx(math.log(2) / (0.05 * math.sqrt(2)), rel=1e-4),
                "score": 0.5,
                "device": "cuda:1",
            }
        ],
        "local_sections": {},
        "ranks": [0, 1],
        "measuring": True,
        "stragglers": [],
    }


def test_log_and_report_agree():
    found = compared(rows_of([(ms, *(NAN,) * 5, ms / 2) for ms in (10.0, 10.1, 9.9, 15.0)]))
    for metric in METRICS:
        extremes = [(value, rank) for value, rank, _ in (v() for v in found.report.min_max(metric))]
        assert str(extremes) == str(list(found.extremes[metric]))
    assert found.report.throughput_ends(2) == found.throughput_ends(2)
    assert found.report.stragglers == found.stragglers


def synthetic(world):
    """A healthy job of many ranks with a few that are slow, as plain lists and as rows."""
    generator = torch.Generator().manual_seed(world)
    noise = torch.randn(7, world, generator=generator, dtype=torch.float64)
    usual = torch.tensor([10.0, 5.0, 60.0, 400.0, 97.0, 1980.0, 30.0], dtype=torch.float64)
    metrics = usual[:, None] * (1 + 0.002 * noise)
    for rank, column, value in ((7, 0, 15.0), (world - 1, 5, 900.0), (world // 2, 2, 95.0)):
        metrics[column, rank] = value
    metrics[1, 5] = NAN
    rows = torch.zeros(world, 24, dtype=torch.float64)
    rows[:, 0] = rows[:, 2] = rows[:, 3] = 1.0
    rows[:, 5:12] = metrics.t()
    rows[:, 12], rows[:, 13] = 10.0, 1e15
    rows[:, 16:20] = torch.stack([torch.ones(world), *metrics[:1].expand(3, world)], dim=1)
    rows[:, 21:24] = NAN
    return metrics.tolist(), rows


def test_many_ranks_against_a_plain_loop():
    world = 16384
    metrics, rows = synthetic(world)
    found = compared(rows)
    report = found.report
    for key, values in zip(report.metrics, metrics, strict=True):
        known = [value for value in values if math.isfinite(value)]
        assert report.min_max(key)[0]()[:2] == (min(known), values.index(min(known)))
        assert report.min_max(key)[1]()[:2] == (max(known), values.index(max(known)))
    assert sorted((outlier.metric, outlier.rank) for outlier in report.outliers) == [
        ("clock_mhz", world - 1), ("elapsed_ms", 7), ("temp_c", world // 2),
    ]  # fmt: skip
    fastest = min(metrics[0])
    assert report.relative_scores["compute"] == tuple(fastest / value for value in metrics[0])
    assert report.sections["compute"][7] == SectionStats(1, 15.0, 15.0, 15.0)
    first, bottom, _ = report_lines(found, num_ranks=3)
    assert LINE.fullmatch(first)
    lowest = sorted((value, rank) for rank, value in enumerate(metrics[6]))[:3]
    assert bottom.endswith(" ".join(f"{value:.2f}/{rank}," for value, rank in lowest))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("seed", range(4))
def test_reports_against_plain_python(world, seed):
    """Whatever is missing, equal or out of order."""
    names = ("compute", "data", "attention")
    past = PastReports(names)
    best_ms = {name: [NAN] * world for name in ("compute", "attention")}
    random.seed(world * 10 + seed)
    ranks = tuple(random.sample(range(world), world))
    values = [0.0, 10.0, 10.0, 10.5, 40.0, 10.2, 1e300, NAN, math.inf]
    for _ in range(3):
        stats = [
            {kind: SectionStats(1, 1.0, random.choice(values[:5]), 1.0) for kind in (0, 1, 2)}
            for _ in ranks
        ]
        rows = [random.choices(values, k=7) for _ in ranks]
        found = compared(rows_of(rows, names, stats), names, ranks=ranks, past=past)
        metrics = dict(zip(METRICS, zip(*rows, strict=True), strict=True))
        relative, individual, medians = {}, {}, {}
        for kind, name in ((0, "compute"), (2, "attention")):
            medians[name] = [of_rank[kind].median_ms or NAN for of_rank in stats]
            fastest = min((ms for ms in medians[name] if ms > 0), default=NAN)
            best_ms[name] = [
                new if math.isnan(old) or new < old else old
                for old, new in zip(best_ms[name], medians[name], strict=True)
            ]
            relative[name] = [fastest / ms for ms in medians[name]]
            pairs = zip(best_ms[name], medians[name], strict=True)
            individual[name] = [least / ms for least, ms in pairs]
        assert dataclasses.replace(found.report, outliers=(), measuring=False) == StragglerReport(
            unix_time=1.7e9,
            world_size=world,
            log_interval=10,
            total_flops=1e12,
            hosts=tuple(f"node{rank // 2}" for rank in ranks),
            devices=tuple(f"cuda:{rank % 2}" for rank in ranks),
            metrics=metrics,
            sections={
                name: tuple(of_rank[kind] for of_rank in stats) for kind, name in enumerate(names)
            },
            relative_scores=relative,
            individual_scores=individual,
            outliers=(),
            ranks=ranks,
        )
        for metric, by_rank in metrics.items():
            known = [pair for pair in zip(by_rank, ranks, strict=True) if math.isfinite(pair[0])]
            if known:
                smallest = min(known)
                largest = min(known, key=lambda pair: (-pair[0], pair[1]))
                assert found.extremes[metric] == (smallest, largest)
            else:
                assert [rank for _, rank in found.extremes[metric]] == [-1, -1]


def test_what_nobody_reads_is_not_made():
    found = compared(synthetic(256)[1])
    report_lines(found, num_ranks=3)
    outlier_lines(found.stragglers)
    assert "report" not in vars(found)
    assert len(found.report.metrics["elapsed_ms"]) == 256
    assert found.report is found.report


def test_text_and_call_of_a_value():
    value = _ValueWithRank(48.126, 3, "ms")
    assert str(value) == "48.13ms/3"
    assert value() == (48.126, 3, "ms")
    assert str(_ValueWithRank(math.nan, -1, "W")) == "nanW/-1"
    assert _ValueWithRank(1.0, 2)() == (1.0, 2, "")


def test_order_of_values_looks_at_numbers_alone():
    low, high = _ValueWithRank(1.0, 9, "W"), _ValueWithRank(2.0, 0, "C")
    assert low < high
    assert high > low
    assert low <= _ValueWithRank(1.0, 0)
    assert low >= _ValueWithRank(1.0, 0)
    assert not low > _ValueWithRank(1.0, 0)
    assert sorted([high, low]) == [low, high]


def test_equality_of_values_looks_at_all_three():
    value = _ValueWithRank(1.0, 2, "ms")
    assert value == _ValueWithRank(1.0, 2, "ms")
    assert hash(value) == hash(_ValueWithRank(1.0, 2, "ms"))
    for other in (_ValueWithRank(1.5, 2, "ms"), _ValueWithRank(1.0, 3, "ms"), 1.0):
        assert value != other
    assert value != _ValueWithRank(1.0, 2, "W")


@pytest.mark.parametrize(
    ("name", "unit"),
    [("elapsed", "ms"), ("btime", "ms"), ("temp", "C"), ("power", "W"), ("util", "%"),
     ("clock", "MHz")],
)  # fmt: skip
def test_extremes_start_as_nobody(name, unit):
    for side in ("min", "max"):
        assert str(getattr(_StragglerData(), f"{side}_{name}")) == f"nan{unit}/-1"


def test_extremes_belong_to_the_instance():
    one, other = _StragglerData(), _StragglerData()
    one.min_temp = _ValueWithRank(50.0, 1, "C")
    assert math.isnan(other.min_temp()[0])
    assert len(dataclasses.fields(_StragglerData)) == 13
    assert one.aflops is None
