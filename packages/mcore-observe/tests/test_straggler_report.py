import json
import math
import random
import re
import statistics

import pytest
import torch

import mcore.observe.straggler.gathered_rows as gathered_rows
from mcore.observe import Outlier, SectionStats, StragglerReport
from mcore.observe.straggler.column_statistics import extremes, finite_part, median, spread_of
from mcore.observe.straggler.gathered_report import GatheredReport, straggler_data
from mcore.observe.straggler.gathered_rows import GatheredRows
from mcore.observe.straggler.outliers import OutlierRule, outlier_lines
from mcore.observe.straggler.report_lines import report_lines
from mcore.observe.straggler.rows import ENABLED, RowHeader, encode_row, etpt_tf, row_length
from mcore.observe.straggler.scores import BestMedians
from mcore.observe.straggler.sections import section_hash

NAN = math.nan
NAMES = ("compute", "data")


def rows_of(metrics, names=NAMES, stats=None, **header):
    """One row a rank; ``metrics`` has seven numbers for each."""
    header = {"log_interval": 10, "total_flops": 1e12, **header}
    return torch.stack(
        [
            encode_row(
                RowHeader(section_hash(names), True, True, metrics=seven, idle=False, **header),
                (stats[rank] if stats else {0: SectionStats(1, seven[0], seven[0], seven[0])}),
                len(names),
            )
            for rank, seven in enumerate(metrics)
        ]
    )


def report_of(rows, names=NAMES, ranks=None, best=None, rule=None, **kwargs):
    ranks = ranks or tuple(range(len(rows)))
    return GatheredReport(
        GatheredRows(rows, ranks, torch.tensor(ranks)),
        unix_time=1.7e9,
        hosts=tuple(f"node{rank // 2}" for rank in ranks),
        names=names,
        best=best or BestMedians(),
        rule=rule or OutlierRule(),
        local_sections={},
        **kwargs,
    )


def elapsed_report(*elapsed_ms, **kwargs):
    return report_of(rows_of([(ms, NAN, NAN, NAN, NAN, NAN, 1.0) for ms in elapsed_ms]), **kwargs)


def test_row_has_the_documented_places():
    header = RowHeader(
        sections_hash=7.0,
        enabled=True,
        wanted=False,
        idle=False,
        metrics=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
        log_interval=10,
        total_flops=1e15,
        dropped=3,
    )
    stats = {0: SectionStats(2, 9.0, 4.5, 5.0), 2: SectionStats(1, 3.0, 3.0, 3.0)}
    row = encode_row(header, stats, 3)
    assert row.dtype == torch.float64
    assert row.numel() == row_length(3) == 16 + 4 * 3
    assert row[:16].tolist() == [1, 7, 1, 0, 0, 1, 2, 3, 4, 5, 6, 8, 10, 1e15, 3, 0]
    assert row[16:20].tolist() == [2, 9.0, 4.5, 5.0]
    assert row[20:22].tolist() == [0, 0.0]
    assert row[22:24].isnan().all()
    assert row[24:].tolist() == [1, 3.0, 3.0, 3.0]
    assert encode_row(header, {5: SectionStats(1, 1.0, 1.0, 1.0)}, 2).numel() == 24


def test_throughput():
    assert round(etpt_tf(1e12, 10.0, world=1, amp=3.0), 2) == 33.33
    assert etpt_tf(4.8e13, 100.0, world=4, amp=3.0) == 40.0
    assert etpt_tf(1e12, 0.0, world=1, amp=3.0) == 0.0


def test_z_of_the_documented_examples():
    def z_of(*values):
        values = torch.tensor(values, dtype=torch.float64)
        center = median(values)
        spread = spread_of(values, center)
        return center, [round(float(value - center) / spread, 2) for value in values]

    assert z_of(100, 101, 99, 100, 150) == (100.0, [0.0, 0.67, -0.67, 0.0, 33.72])
    assert z_of(10, 10, 10, 10) == (10.0, [0.0] * 4)
    assert z_of(10, 10, 10, 10.5) == (10.0, [0.0, 0.0, 0.0, 5.0])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 100, 101])
def test_median_is_that_of_the_statistics_module(num):
    random.seed(num)
    for values in ([random.random() for _ in range(num)], [float(i // 3) for i in range(num)]):
        assert median(torch.tensor(values, dtype=torch.float64)) == statistics.median(values)


def test_median_of_nothing():
    assert math.isnan(median(torch.empty(0)))
    assert finite_part(torch.tensor([NAN, math.inf, 1.0])).tolist() == [1.0]


def test_outliers_by_z():
    [outlier] = elapsed_report(100, 101, 99, 100, 150).outliers
    assert outlier.metric == "elapsed_ms"
    assert (outlier.rank, outlier.host, outlier.value, outlier.median) == (4, "node2", 150.0, 100.0)
    assert round(outlier.z, 2) == 33.72
    assert round(outlier.score, 2) == 0.66
    assert elapsed_report(10, 10, 10, 10).outliers == ()
    [outlier] = elapsed_report(10, 10, 10, 10.5).outliers
    assert (outlier.rank, outlier.z) == (3, 5.0)
    assert elapsed_report(10, 10, 10, 10.5, rule=OutlierRule(z=5.1)).outliers == ()
    assert elapsed_report(0, 0, 0, 0).outliers == ()
    assert elapsed_report(0, 0, 0, 0, 5).outliers == ()


def test_outliers_on_the_bad_side_only():
    usual = [10.0, 5.0, 60.0, 400.0, 99.0, 1980.0, 30.0]
    for column, change, stands_out in [
        (0, 20.0, True), (0, 1.0, False), (1, 20.0, True), (1, 1.0, False),
        (2, 90.0, True), (2, 20.0, False), (3, 700.0, False), (3, 10.0, False),
        (4, 50.0, True), (4, 150.0, False), (5, 1200.0, True), (5, 2900.0, False),
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


def test_few_ranks_are_judged_by_scores():
    report = elapsed_report(10.0, 20.0)
    [outlier] = report.outliers
    assert (outlier.metric, outlier.rank, outlier.value) == ("compute", 1, 20.0)
    assert (outlier.median, outlier.score) == (15.0, 0.5)
    assert math.isnan(outlier.z)
    assert elapsed_report(10.0, 13.0, 12.0).outliers == ()
    best = BestMedians()
    elapsed_report(10.0, best=best)
    [outlier] = elapsed_report(20.0, best=best).outliers
    assert (outlier.rank, outlier.score) == (0, 0.5)
    assert elapsed_report(20.0, best=best, rule=OutlierRule(individual=0.4)).outliers == ()


def test_scores():
    best = BestMedians()
    first = elapsed_report(10.0, 10.1, 9.9, 15.0, best=best)
    scores = first.relative_scores["compute"]
    assert [round(score, 3) for score in scores] == [0.99, 0.98, 1.0, 0.66]
    assert first.individual_scores["compute"] == (1.0,) * 4
    second = elapsed_report(20.0, 10.1, NAN, 7.5, best=best)
    assert second.individual_scores["compute"][:2] == (0.5, 1.0)
    assert math.isnan(second.relative_scores["compute"][2])
    assert second.individual_scores["compute"][3] == 1.0
    third = elapsed_report(10.0, 10.1, 9.9, 15.0, best=best)
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
         2: SectionStats(4, 8.0, 2.0, 3.0)},
    ]  # fmt: skip
    report = report_of(rows_of([(8.0, *(NAN,) * 6)] * 2, names, stats), names)
    assert list(report.sections) == list(names)
    assert report.sections["attention"] == (stats[0][2], stats[1][2])
    assert report.sections["data"][1] == stats[1][1]
    assert report.sections["data"][0].count == 0
    assert math.isnan(report.sections["data"][0].median_ms)
    assert report.relative_scores == {"compute": (1.0, 1.0), "attention": (1.0, 0.5)}
    assert [(o.metric, o.rank, o.score) for o in report.outliers] == [("attention", 1, 0.5)]


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
    first, bottom, top = report_lines(report_of(rows), num_ranks=2)
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
        assert len(report_lines(report_of(rows), num_ranks=num_ranks)) == 1


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
    report = elapsed_report(10, 10, 10, 10, 10, 12, 15)
    assert [outlier.rank for outlier in report.outliers] == [6, 5]


def test_straggler_data_of_a_report():
    rows = rows_of(
        [(20.0, 1.0, 60.0, NAN, 99.0, 1980.0, 8.0), (30.0, 2.0, 70.0, NAN, 98.0, 1.0, 5)]
    )
    data = straggler_data(report_of(rows))
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
    assert read["outliers"][0]["metric"] == "compute"
    assert read["outliers"][0]["z"] is None
    assert read["hosts"] == ["node0", "node0"]
    assert list(read)[:5] == ["unix_time", "world_size", "log_interval", "total_flops", "hosts"]


def test_gathered_report_is_the_report_of_its_fields():
    gathered = elapsed_report(10.0, 10.1, 9.9, 15.0)
    fields = {name: getattr(gathered, name) for name in StragglerReport.__dataclass_fields__}
    plain = StragglerReport(**fields)
    assert plain.to_dict() == gathered.to_dict()
    assert plain.to_prometheus() == gathered.to_prometheus()
    for metric in gathered.metrics:
        assert [str(value) for value in plain.min_max(metric)] == [
            str(value) for value in gathered.min_max(metric)
        ]
    assert plain.throughput_ends(2) == gathered.throughput_ends(2)
    with pytest.raises(AttributeError):
        gathered.world_size = 3


def test_disagreement_on_the_state_is_found():
    rows = rows_of([(1.0, *(NAN,) * 6)] * 3)
    rows[1, 2] = 0.0
    said = GatheredRows(rows, (2, 0, 1), torch.tensor([2, 0, 1]))
    assert (said.is_on, said.has_interval) == (False, False)
    assert said.ranks_unlike(ENABLED) == [2, 1]


@pytest.mark.parametrize(("interval", "has_interval"), [(10.0, True), (0.0, False), (NAN, False)])
def test_rank_0_says_whether_there_is_an_interval(interval, has_interval):
    rows = rows_of([(1.0, *(NAN,) * 6)] * 2)
    rows[1, 12] = interval
    said = GatheredRows(rows, (1, 0), torch.tensor([1, 0]))
    assert (said.is_on, said.has_interval) == (True, has_interval)
    assert said.log_interval == (10 if has_interval else 0)


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
    rows[:, 22:24] = NAN
    return metrics.tolist(), rows


def test_many_ranks_against_a_plain_loop():
    world = 16384
    metrics, rows = synthetic(world)
    report = report_of(rows)
    keys = list(report.metrics)
    expected = []
    for key, values, side in zip(keys, metrics, (1, 1, 1, 0, -1, -1, 0), strict=True):
        known = [value for value in values if math.isfinite(value)]
        assert report.min_max(key)[0]()[:2] == (min(known), values.index(min(known)))
        assert report.min_max(key)[1]()[:2] == (max(known), values.index(max(known)))
        center = statistics.median(known)
        mad = statistics.median(abs(value - center) for value in known)
        spread = max(1.4826 * mad, 0.01 * abs(center))
        expected += [
            (key, rank)
            for rank, value in enumerate(values)
            if side and side * (value - center) / spread >= 3.5
        ]
    assert len(expected) == 3
    assert sorted((outlier.metric, outlier.rank) for outlier in report.outliers) == sorted(expected)
    fastest = min(metrics[0])
    assert report.relative_scores["compute"] == tuple(fastest / value for value in metrics[0])
    assert report.sections["compute"][7] == SectionStats(1, 15.0, 15.0, 15.0)
    first, bottom, _ = report_lines(report, num_ranks=3)
    assert LINE.fullmatch(first)
    lowest = sorted((value, rank) for rank, value in enumerate(metrics[6]))[:3]
    assert bottom.endswith(" ".join(f"{value:.2f}/{rank}," for value, rank in lowest))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("seed", range(4))
def test_few_ranks_are_reported_like_many(world, seed, monkeypatch):
    """Lists and tensors give the same report, whatever is missing, equal or out of order."""
    names, best = ("compute", "data", "attention"), (BestMedians(), BestMedians())
    random.seed(world * 10 + seed)
    ranks = tuple(random.sample(range(world), world))
    for _ in range(3):
        values = [0.0, 10.0, 10.0, 10.5, 40.0, 1e300, NAN, math.inf]
        stats = [
            {kind: SectionStats(1, 1.0, random.choice(values[:5]), 1.0) for kind in (0, 1, 2)}
            for _ in ranks
        ]
        rows = rows_of([random.choices(values, k=7) for _ in ranks], names, stats)
        reports = []
        for few_numbers, best_of_kind in zip((10**6, 0), best, strict=True):
            monkeypatch.setattr(gathered_rows, "FEW_NUMBERS", few_numbers)
            reports.append(report_of(rows, names, ranks, best_of_kind))
        assert reports[0]._rows.lists is not None
        assert reports[1]._rows.lists is None
        listed, tensors = (report.to_json() for report in reports)
        assert listed == tensors
        assert str(straggler_data(reports[0])) == str(straggler_data(reports[1]))
        assert report_lines(reports[0], num_ranks=2) == report_lines(reports[1], num_ranks=2)


def test_what_nobody_reads_is_not_made():
    report = report_of(synthetic(256)[1])
    report_lines(report, num_ranks=1)
    outlier_lines(report.outliers)
    made = set(vars(report))
    assert made.isdisjoint({"metrics", "sections", "relative_scores", "individual_scores"})
    assert len(report.metrics["elapsed_ms"]) == 256


def test_extremes_of_several_rows():
    rows = torch.tensor([[3.0, NAN, 1.0], [NAN, NAN, NAN], [2.0, 2.0, 2.0]])
    (three, nothing, equal) = extremes(rows, torch.tensor([0, 1, 2]))
    assert three == ((1.0, 2), (3.0, 0))
    assert [rank for _, rank in nothing] == [-1, -1]
    assert equal == ((2.0, 0), (2.0, 0))
