"""Who is named, and who is not: simulated jobs with noise of their own."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import SectionStats
from mcore.observe.straggler.exchange import GatheredRows, encode_row
from mcore.observe.straggler.outliers import PastReports
from mcore.observe.straggler.report import RankComparison
from rank_testing.scripts import run_script

NAN = math.nan
NAMES = ("compute", "data")
ELAPSED, TEMPERATURE, SUM_OF_DATA = 5, 7, 21


class Job:
    """Ranks that need 100 ms an iteration, with noise from report to report."""

    def __init__(self, world, *, noise=0.05, seed=0, peers=()):
        self.random = torch.Generator().manual_seed(seed)
        self.world, self.noise, self.past = world, noise, PastReports(NAMES, peers=peers)
        row = encode_row(
            0.0, {0: SectionStats(1, 1.0, 1.0, 1.0)}, 2, enabled=True, wanted=True, log_interval=1
        )
        self.rows = row.repeat(world, 1)
        self.idle = torch.zeros(world, dtype=torch.bool)

    def compare(self, slow=(), factor=1.0, data_ms=None, temperatures=None):
        noise = torch.randn(self.world, generator=self.random, dtype=torch.float64)
        elapsed_ms = 100 * (self.noise * noise).exp()
        elapsed_ms[list(slow)] *= factor
        rows = self.rows.clone()
        rows[:, ELAPSED] = elapsed_ms.where(~self.idle, NAN)
        if data_ms is not None:
            rows[:, SUM_OF_DATA] = torch.tensor(data_ms)
        if temperatures is not None:
            rows[:, TEMPERATURE] = torch.tensor(temperatures)
        return RankComparison(
            GatheredRows(rows, tuple(range(self.world))),
            unix_time=0.0,
            hosts=("h",) * self.world,
            names=NAMES,
            past=self.past,
        )

    def report(self, *args, **kwargs):
        """Who is named after one more report, by metric."""
        found = self.compare(*args, **kwargs)
        return sorted((one.metric, one.rank) for one in found.stragglers)

    def reports(self, number, *args):
        return [self.report(*args) for _ in range(number)]


def elapsed(*ranks):
    return [("elapsed_ms", rank) for rank in ranks]


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.2])
@pytest.mark.parametrize(
    ("world", "reports"), [(1, 100), (2, 100), (8, 100), (64, 50), (1024, 24), (16384, 12)]
)
def test_equal_ranks_are_not_named(world, reports, noise):
    assert Job(world, noise=noise).reports(reports) == [[]] * reports


def test_noise_that_lasts_names_few_ranks_in_the_first_reports():
    """5 % of noise, of which 90 % remain: a hundred of 1,000 reports of 8 ranks named one."""
    num_named, noise = 0, torch.zeros(8, dtype=torch.float64)
    for seed in range(10):
        job = Job(8, noise=0.0)
        random = torch.Generator().manual_seed(seed)
        for number in range(24):
            new = 0.05 * torch.randn(8, generator=random, dtype=torch.float64)
            noise = 0.9 * noise + math.sqrt(1 - 0.9**2) * new if number else new
            found = job.compare(range(8), noise.exp())
            num_named += bool(found.stragglers)
    assert num_named <= 3


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_no_verdict_before_the_noise_is_known(world):
    """Ranks with 10 % of noise named each other in the first reports of half of the jobs."""
    for seed in range(5):
        assert Job(world, noise=0.1, seed=seed).reports(24) == [[]] * 24
    job = Job(world)
    measuring = [job.compare().report.measuring for _ in range(16)]
    assert measuring.index(False) + 1 == {1: 15, 2: 10, 8: 8, 64: 5}[world]


@pytest.mark.parametrize(
    ("noise", "factor", "reports"), [(0.02, 1.2, 5), (0.005, 1.05, 10), (0.02, 1.1, 20)]
)
@pytest.mark.parametrize(("world", "jobs"), [(2, 5), (8, 5), (1024, 2)])
def test_a_rank_that_becomes_slow_is_named_soon(world, jobs, noise, factor, reports):
    num_named = 0
    if world == 2:  # few measurements of the noise: the median is 3 reports, a few jobs need more
        reports *= 2
    for seed in range(jobs):
        job = Job(world, noise=noise, seed=seed)
        assert job.reports(40) == [[]] * 40
        num_named += any(job.report([1], factor) == elapsed(1) for _ in range(reports))
    assert num_named >= 0.8 * jobs


@pytest.mark.parametrize("world", [3, 8, 64])
@pytest.mark.parametrize("factor", [1.05, 1.14])
def test_a_rank_that_has_always_been_a_bit_slower_is_named(world, factor):
    named = Job(world, noise=0.005).reports(20, [1], factor)
    assert named[9:] == [elapsed(1)] * 11


@pytest.mark.parametrize("world", [2, 4, 5, 64])
def test_half_of_the_ranks_are_named(world):
    slow = range(world // 2)
    named = Job(world, noise=0.005).reports(24, slow, 1.12)
    assert named[12:] == [elapsed(*slow)] * 12


def test_sensors_explain_a_slow_rank_and_are_no_verdict():
    job = Job(8, noise=0.001)
    warm = [55.0, 56.0, 55.0, 57.0, 55.0, 56.0, 55.0, 85.0]
    for _ in range(20):
        found = job.compare(temperatures=warm)
        assert found.stragglers == ()
    assert [(one.metric, one.rank) for one in found.report.outliers] == [("temp_c", 7)]


@pytest.mark.parametrize("every", [2, 4, 10])
def test_times_in_every_nth_report_are_enough(every):
    job, named = Job(8, noise=0.02), []
    for number in range(12 * every):
        job.idle[:] = number % every != 0
        named.append(job.report([3], 3.0))
    known = named[8 * every :]
    assert known == [elapsed(3)] * len(known)


def test_ranks_that_are_timed_in_different_reports_are_compared():
    job, named = Job(8, noise=0.02), []
    for number in range(48):
        job.idle[:] = (torch.arange(8) + number) % 4 != 0
        named.append(job.report([3], 2.0))
    assert named[40:] == [elapsed(3)] * 8


def test_a_value_of_long_ago_is_no_verdict():
    job = Job(8, noise=0.02)
    assert job.reports(12, [3], 2.0)[-1] == elapsed(3)
    job.idle[3] = True
    assert job.reports(30)[-1] == []


def test_pauses_are_no_verdict():
    """A save in every second report made 498 of 500 reports name rank 0."""
    for world in (1, 2, 8, 64):
        job = Job(world, noise=0.02)
        assert [job.report([0], 1.0 + number % 2) for number in range(100)] == [[]] * 100
        job = Job(world, noise=0.02)
        named = [
            job.report([rank for rank in range(world) if (rank + number) % 7 == 0], 3.0)
            for number in range(100)
        ]
        assert named == [[]] * 100


def test_noise_that_lasts_is_recognised():
    job, drift = Job(64, noise=0.0), torch.zeros(64)
    for _ in range(100):
        drift = 0.9 * drift + 0.02 * torch.randn(64, generator=job.random)
        job.rows[:, SUM_OF_DATA] = 50 * drift.exp()
        assert job.report() == []


def test_peers_are_compared_with_each_other_and_others_with_their_past():
    labels = ("embedding", "middle", "middle", "middle", "head")

    def report(job, *slow):
        job.rows[:, SUM_OF_DATA] = 50 * torch.tensor([2.0, 1.0, 1.0, 1.0, 1.4])
        job.rows[:, SUM_OF_DATA] *= 1 + 0.01 * torch.randn(5, generator=job.random)
        for rank in slow:
            job.rows[rank, SUM_OF_DATA] *= 1.25
        return job.report()

    job, alike = Job(5, noise=0.01, peers=labels), Job(5, noise=0.01)
    together = [(report(job), report(alike)) for _ in range(40)]
    assert {tuple(named) for named, _ in together} == {()}
    assert together[-1][1] == [("data", 0), ("data", 4)]
    assert [report(job, 2) for _ in range(6)][-1] == [("data", 2)]
    assert [report(job) for _ in range(20)][-1] == []
    assert [report(job, 4) for _ in range(6)][-1] == [("data", 4)]


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
        job.reports(4, range(num_slow), 2.0)
        with Count() as count:
            assert job.report(range(num_slow), 2.0) == elapsed(*range(num_slow))
        return count.number

    assert operations(1024) <= operations(1)


def test_one_slow_report_is_not_enough():
    job = Job(8)
    named = [job.report([3], 1.0 if number != 19 else 10.0) for number in range(24)]
    assert named == [[]] * 24


def test_a_new_work_load_of_all_names_nobody():
    job = Job(4)
    assert job.reports(12) + job.reports(28, range(4), 3.0) == [[]] * 40


def test_a_rank_that_has_become_slower_than_it_was_is_named():
    """Though it is not slower than others, which have more work."""
    job = Job(8, noise=0.01)
    job.reports(20, [0], 0.5)
    named = job.reports(30, [0], 0.9)
    assert named[:6] == [[], [], *[elapsed(0)] * 4]
    assert named[-1] == []  # it is used to it


def test_short_waits_for_data_are_nobodys_fault():
    job = Job(4, noise=0.0)
    for _ in range(12):
        assert job.report(data_ms=[0.02, 0.02, 0.02, 1.5]) == []  # of 100 ms
    named = [job.report(data_ms=[0.02, 0.02, 0.02, 40.0]) for _ in range(5)]
    assert named[-1] == [("data", 3)]


def test_ranks_without_times_take_no_part():
    job = Job(4, noise=0.0)
    job.idle[2] = True
    assert job.reports(10, [3], 2.0)[-1] == elapsed(3)


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
