"""The ranks that the straggler detector and nvidia-resiliency-ext report: simulated jobs.

``python -m bench.verdicts [--reports N]``. Both get the same times. Up to four ranks the peer's
report judges them, on real ranks. Beyond that its two scores do, after a check that they agree.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.peers import name_of
from mcore.observe import SectionStats
from mcore.observe.straggler.exchange import ELAPSED, GatheredRows, encode_row
from mcore.observe.straggler.outliers import OutlierRule, PastReports
from mcore.observe.straggler.report import RankComparison
from rank_testing import run_ranks

_NAMES = ("compute", "data")
_NOISE = 0.05
_BEFORE, _WITHIN = 12, 3
_PEER_THRESHOLD = 0.75  # its default
_Verdicts = list[set[int]]  # per report, the reported ranks


class _Case(NamedTuple):
    """Equal ranks, some of which become slow after twelve reports."""

    name: str
    slow_share: float = 0.0  # of the ranks, rounded up
    factor: float = 1.0

    def count_slow(self, world: int) -> int:
        return math.ceil(self.slow_share * world)


_SLOW = (_Case("one rank takes 30 % longer", 1e-9, 1.3), _Case("half take twice as long", 0.5, 2.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one table. Returns 1 if the peer's scores disagree with its report."""
    parser = argparse.ArgumentParser(prog="hatch run verdicts", description=__doc__)
    parser.add_argument("--reports", type=int, default=2000, help="number of reports, equal ranks")
    reports = parser.parse_args(arguments).reports
    peer = name_of("nvidia-resiliency-ext")
    print(
        f"times with {_NOISE:.0%} noise. mcore-observe, then {peer} with its default thresholds\n"
    )
    for world in (2, 4, 64, 1024, 16384):
        judges = [judge_by_detector, judge_by_scores]
        if world <= 4:
            times = simulate_times(_Case(""), world, 50, seed=1)
            if judge_by_scores(times) != run_ranks(judge_by_peer, world, times.tolist())[0]:
                print(f"{world} ranks: the peer's report disagrees with its scores")
                return 1
        equal = simulate_times(_Case("equal"), world, reports, seed=0)
        wrong = [sum(map(bool, judge(equal))) / reports for judge in judges]
        print(f"{world:6} ranks  equal, reports of a slow rank: {_format(wrong)} of {reports}")
        for case in _SLOW:
            num_jobs = max(20, reports // 20)
            found = [_share_found(judge, case, world, num_jobs) for judge in judges]
            text = f"{case.name}, reported within {_WITHIN} reports"
            print(f"{'':14}{text}: {_format(found)} of {num_jobs} jobs", flush=True)
    return 0


def simulate_times(case: _Case, world: int, reports: int, *, seed: int) -> torch.Tensor:
    """Times of an iteration in ms, ``[reports, world]``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(reports, world, generator=generator, dtype=torch.float64)
    times = noise.mul_(_NOISE).add_(1).mul_(100)
    times[_BEFORE:, : case.count_slow(world)] *= case.factor
    return times


def judge_by_detector(times: torch.Tensor) -> _Verdicts:
    """The ranks that the straggler detector reports."""
    world, past = times.shape[1], PastReports(_NAMES)
    stats = {0: SectionStats(1, 1.0, 1.0, 1.0)}
    row = encode_row(0.0, stats, 2, enabled=True, wanted=True, log_interval=1)
    rows, verdicts = row.repeat(world, 1), []
    for of_report in times:
        rows = rows.clone()
        rows[:, ELAPSED] = of_report
        found = RankComparison(
            GatheredRows(rows, tuple(range(world))), unix_time=0.0, hosts=("host",) * world,
            names=_NAMES, rule=OutlierRule(), past=past,
        )  # fmt: skip
        verdicts.append({one.rank for one in found.stragglers})
    return verdicts


def judge_by_scores(times: torch.Tensor) -> _Verdicts:
    """The ranks with a score below the threshold.

    The scores are the fastest rank's time over the rank's time, and the rank's best time over it.
    """
    times = times.float()
    best = times.cummin(dim=0).values
    relative = times.amin(dim=1, keepdim=True) / times
    is_slow = (relative < _PEER_THRESHOLD) | (best / times < _PEER_THRESHOLD)
    return [set(of_report.nonzero().flatten().tolist()) for of_report in is_slow]


def judge_by_peer(times: list[list[float]]) -> _Verdicts:
    """The ranks that the peer reports, on real ranks. Empty on all but rank 0."""
    reporting: Any = import_module("nvidia_resiliency_ext.straggler.reporting")
    statistics: Any = import_module("nvidia_resiliency_ext.straggler.statistics")
    generator = reporting.ReportGenerator(["relative_perf_scores", "individual_perf_scores"])
    verdicts = []
    for of_report in times:
        own = of_report[dist.get_rank()]
        summary = dict.fromkeys(statistics.Statistic, own)
        report = generator.generate_report({"compute": summary}, {})
        if report is not None:
            found = report.identify_stragglers(
                section_rel_threshold=_PEER_THRESHOLD, section_indiv_threshold=_PEER_THRESHOLD
            )
            sections = ("straggler_sections_relative", "straggler_sections_individual")
            named = [each for kind in sections for ranks in found[kind].values() for each in ranks]
            verdicts.append({each.rank for each in named})
    return verdicts


def _share_found(
    judge: Callable[[torch.Tensor], _Verdicts], case: _Case, world: int, num_jobs: int
) -> float:
    slow, found = set(range(case.count_slow(world))), 0
    for seed in range(num_jobs):
        verdicts = judge(simulate_times(case, world, _BEFORE + _WITHIN, seed=seed))
        found += any(slow <= named for named in verdicts[_BEFORE:])
    return found / num_jobs


def _format(shares: Sequence[float]) -> str:
    return " against ".join(f"{share:7.2%}" for share in shares)


if __name__ == "__main__":
    raise SystemExit(main())
