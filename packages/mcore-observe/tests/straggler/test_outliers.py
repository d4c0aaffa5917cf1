"""Who is named, and who is not: simulated jobs with noise of their own."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import SectionStats
from mcore.observe.straggler.exchange import GatheredRows, encode_row
from mcore.observe.straggler.outliers import OutlierRule, PastReports
from mcore.observe.straggler.report import RankComparison
from rank_testing.scripts import run_script

NAN = math.nan
NAMES = ("compute", "data")
ELAPSED, SUM_OF_DATA = 5, 21


class Job:
    """Ranks that need 100 ms an iteration, with noise from report to report."""

    def __init__(self, world, *, noise=0.05, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.world, self.noise, self.past = world, noise, PastReports(NAMES)
        row = encode_row(
            0.0, {0: SectionStats(1, 1.0, 1.0, 1.0)}, 2, enabled=True, wanted=True, log_interval=1
        )
        self.rows = row.repeat(world, 1)
        self.idle = torch.zeros(world, dtype=torch.bool)

    def report(self, slow=(), factor=1.0, data_ms=None):
        """Who is named after one more report, by metric."""
        noise = torch.randn(self.world, generator=self.random, dtype=torch.float64)
        elapsed_ms = 100 * (1 + self.noise * noise)
        elapsed_ms[list(slow)] *= factor
        rows = self.rows.clone()
        rows[:, ELAPSED] = elapsed_ms.where(~self.idle, NAN)
        if data_ms is not None:
            rows[:, SUM_OF_DATA] = torch.tensor(data_ms)
        found = RankComparison(
            GatheredRows(rows, tuple(range(self.world))),
            unix_time=0.0,
            hosts=("h",) * self.world,
            names=NAMES,
            rule=OutlierRule(),
            past=self.past,
        )
        return sorted((one.metric, one.rank) for one in found.stragglers)


def elapsed(*ranks):
    return [("elapsed_ms", rank) for rank in ranks]


@pytest.mark.parametrize(
    ("world", "reports"), [(2, 1000), (4, 1000), (64, 500), (1024, 100), (16384, 20)]
)
def test_equal_ranks_are_not_named(world, reports):
    job = Job(world)
    assert sum(job.report() != [] for _ in range(reports)) <= reports / 500


@pytest.mark.parametrize(("world", "jobs"), [(2, 100), (4, 100), (64, 50), (1024, 20)])
@pytest.mark.parametrize("reports_before", [0, 12])
def test_a_rank_that_takes_30_percent_longer_is_named_within_three_reports(
    world, jobs, reports_before
):
    num_named = 0
    for seed in range(jobs):
        job = Job(world, seed=seed)
        for _ in range(reports_before):
            job.report()
        num_named += any(job.report([1], 1.3) == elapsed(1) for _ in range(3))
    assert num_named >= 0.96 * jobs


@pytest.mark.parametrize("world", [2, 4, 5, 64])
def test_half_of_the_ranks_are_named(world):
    job, slow = Job(world), range(world // 2)
    assert [job.report(slow, 2.0) for _ in range(3)][-1] == elapsed(*slow)


def test_many_slow_ranks_cost_no_more_operations_than_one():
    """Half of 16,384 ranks took 16 s a report, in 16,000 operations."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **kwargs or {})

    def operations(num_slow):
        job = Job(2048)
        for _ in range(12):
            job.report()
        job.report(range(num_slow), 2.0)
        with Count() as count:
            assert job.report(range(num_slow), 2.0) == elapsed(*range(num_slow))
        return count.number

    assert operations(1024) <= operations(1)


def test_one_slow_report_is_not_enough():
    job = Job(8)
    named = [job.report([3], 1.0 if number != 9 else 10.0) for number in range(14)]
    assert named == [[]] * 14


def test_a_noisy_machine_raises_the_bar():
    """Ranks that vary by 30 % are named rarely, and a rank that needs 30 % more is not clear."""
    job = Job(16, noise=0.3)
    assert sum(job.report() != [] for _ in range(300)) <= 3


def test_a_new_work_load_of_all_names_nobody():
    job = Job(4)
    named = [job.report(range(4), 1.0 if number < 12 else 3.0) for number in range(40)]
    assert named == [[]] * 40


def test_a_rank_that_has_become_slower_than_it_was_is_named():
    """Though it is not slower than others, which have more work: a stage of a pipeline."""
    job = Job(8, noise=0.01)
    for _ in range(11):
        job.report([0], 0.5)
    named = [job.report([0], 0.9) for _ in range(4)]
    assert named == [[], elapsed(0), elapsed(0), elapsed(0)]


def test_short_waits_for_data_are_nobodys_fault():
    job = Job(4, noise=0.0)
    for _ in range(5):
        assert job.report(data_ms=[0.02, 0.02, 0.02, 1.5]) == []  # of 100 ms
    named = [job.report(data_ms=[0.02, 0.02, 0.02, 40.0]) for _ in range(3)]
    assert named[-1] == [("data", 3)]


def test_ranks_without_times_take_no_part():
    job = Job(4, noise=0.0)
    job.idle[2] = True
    assert [job.report([3], 2.0) for _ in range(3)][-1] == elapsed(3)


def test_many_reports_take_no_more_memory_than_some():
    done = run_script(_REPORTS, str(Path(__file__).parent))  # no threads of other tests
    assert done.returncode == 0, done.stderr
    some, many = map(int, done.stdout.split())
    assert 0 < many <= some + 20_000


_REPORTS = """
import gc, sys, tracemalloc
sys.path.insert(0, sys.argv[1])
from test_outliers import Job
job = Job(8)
ours = tracemalloc.Filter(True, "*straggler*")
tracemalloc.start()
for number in range(1200):
    job.report([1], 1.5 if number % 7 else 1.0)
    if number in (400, 1199):
        gc.collect()
        snapshot = tracemalloc.take_snapshot().filter_traces([ours])
        print(sum(trace.size for trace in snapshot.traces))
"""
