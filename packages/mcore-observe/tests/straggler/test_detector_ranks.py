import gc
import logging
import math
import os
import socket
import time
import weakref
from datetime import timedelta
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mcore.observe import StragglerDetector, StragglerFoundError
from rank_testing import RankFailure, run_ranks
from standin import no_host_waits

LOGGER = "mcore.observe.straggler"
MS = 1_000_000
NAN = math.nan


class Records(logging.Handler):
    """Keeps the level and the text of what this rank logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger(LOGGER)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def configured(**kwargs):
    detector = StragglerDetector()
    kwargs = {"rank": dist.get_rank(), "enabled": True, "controller": False, **kwargs}
    detector.configure(dist.get_world_size(), **kwargs)
    return detector


def spend(detector, ms, opened=None):
    """A range of exactly that length: the clock of the ranges is set by hand."""
    clock = iter([0, int(ms * MS)])
    detector._now_ns = lambda: next(clock)
    with detector if opened is None else opened:
        pass


def world_of_four():
    records = Records()
    detector = configured(mmcnt=2)
    elapsed_ms = (100, 101, 99, 150)[detector.my_rank]
    spend(detector, elapsed_ms)
    has_logged = detector.report(4.8e13, 10)
    report = detector.last_report.to_dict()
    for _ in range(7):
        spend(detector, elapsed_ms)
        detector.report(0.0, 10)
    return has_logged, report, records.lines, detector.last_report.stragglers


def two_devices():
    detector, device = configured(), torch.accelerator.current_accelerator()
    values = torch.ones(1000, device=device)
    for _ in range(3):
        with no_host_waits():  # its events are read at the report
            for _ in range(2):
                with detector:
                    values = values + 1
                    if detector.my_rank == 1:
                        time.sleep(0.01)
        detector.report(1e12, 2)
    report = detector.last_report.to_dict()
    report.pop("unix_time")
    return report


def test_two_ranks_time_their_devices(accelerator):
    from standin.plugin import NCCL  # registers the stand-in, which no other rank needs

    if torch.accelerator.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    first, second = run_ranks(two_devices, 2, init=f"{accelerator.type}:{NCCL}")
    assert first == second
    quick, slow = first["metrics"]["elapsed_ms"]
    assert quick > 0
    assert slow >= 10  # two ranges of two iterations each slept as long
    assert [device.split(":")[0] for device in first["devices"]] == [accelerator.type] * 2


def test_four_ranks():
    results = run_ranks(world_of_four, 4)
    assert [has_logged for has_logged, *_ in results] == [True, False, False, False]
    for _, report, _, stragglers in results:
        report.pop("unix_time")
        assert [(one.metric, one.rank) for one in stragglers] == [("elapsed_ms", 3)]
    assert all(report == results[0][1] for _, report, *_ in results)
    report = results[0][1]
    assert report["metrics"]["elapsed_ms"] == [10.0, 10.1, 9.9, 15.0]
    assert report["metrics"]["etpt_tf"][0] == 40.0
    assert [outlier["rank"] for outlier in report["outliers"]] == [3]
    assert round(report["relative_scores"]["compute"][3], 2) == 0.66
    assert report["individual_scores"]["compute"] == [1.0] * 4
    assert len(set(report["hosts"])) == 1
    assert report["devices"] == ["cpu"] * 4
    assert report["world_size"] == 4
    assert [lines for *_, lines, _ in results[1:]] == [[], [], []]
    levels, lines = zip(*results[0][2], strict=True)
    assert levels == ("INFO", "INFO", "INFO", "WARNING")
    assert "MnRtt/Rnk: 9.90ms/2 | MxRtt/Rnk: 15.00ms/3" in lines[0]
    assert lines[1] == "^^^^ Bottom 2 Ranks with lowest  Etpt(TF): 26.67/3, 39.60/1,"
    assert lines[2] == "^^^^ Top    2 Ranks with highest Etpt(TF): 40.00/0, 40.40/2,"
    host = socket.gethostname()
    assert lines[3].startswith(f"straggler: rank 3 (host {host}, cpu) elapsed_ms=")
    assert (stragglers[0].host, stragglers[0].device) == (host, "cpu")


def reacting(on_straggler):
    seen = []
    detector = configured(
        on_straggler=on_straggler or (lambda report: seen.append(report.stragglers[0].rank))
    )
    for _ in range(9):
        spend(detector, (100, 100, 200)[detector.my_rank])
        try:
            detector.report(1e12, 10)
        except StragglerFoundError as error:
            seen.append(str(error))
            break
    return seen


def test_what_is_done_about_a_slow_rank_is_done_on_every_rank():
    assert run_ranks(reacting, 3, None) == [[2, 2]] * 3
    assert run_ranks(reacting, 3, "log") == [[]] * 3
    stopped = run_ranks(reacting, 3, "stop")
    assert all(one == stopped[0] for one in stopped)
    assert stopped[0][0].startswith("straggler: rank 2 (host ")


def stages():
    """The first stage has more work. One rank of the second becomes slow."""
    rank, seen = dist.get_rank(), []
    detector = configured(peers="first" if rank == 0 else "second")
    for number in range(12):
        spend(detector, (300, 100, 100)[rank] * (1 + (rank == 2 and number >= 9)))
        detector.report(1e12, 1)
        seen.append([one.rank for one in detector.last_report.stragglers])
    return seen


def test_ranks_are_compared_with_their_peers():
    assert run_ranks(stages, 3) == [[[]] * 11 + [[2]]] * 3


def compute_then_wait():
    """A rank whose compute takes three times as long, and a collective behind it."""
    detector = configured(sections=["compute part"])
    now_ns = torch.zeros(1, dtype=torch.int64)  # of clocks that are set by hand
    detector._now_ns = lambda: int(now_ns)
    for _ in range(8):
        for _ in range(4):
            with detector:
                with detector.section("compute part"):
                    now_ns += (60 if detector.my_rank == 1 else 20) * MS
                dist.all_reduce(now_ns, dist.ReduceOp.MAX)  # all leave it at the same time
        detector.report(1e12, 4)
    return [(one.metric, one.rank) for one in detector.last_report.stragglers]


def test_a_section_around_the_compute_finds_who_makes_the_others_wait():
    assert run_ranks(compute_then_wait, 4) == [[("compute part", 1)]] * 4


def clocked(seconds_of_steps):
    """Reports by the clock, on ranks that do not agree how long their steps take."""
    detector = configured(report_every_s=0.05)
    reported, step = [], 0
    while len(reported) < 4:
        step += 1
        time.sleep(seconds_of_steps[detector.my_rank])
        before = detector.last_report
        detector.report_if_due(1e9)
        if detector.last_report is not before:
            reported.append(step)
    return reported


def test_reports_by_the_clock_come_after_the_same_step_on_all_ranks():
    first, second = run_ranks(clocked, 2, (0.001, 0.003))
    assert first == second
    assert first[0] == 16


def toggled_over_http():
    detector = configured(enabled=False, controller=True, port=0, token="s3cret")

    def ask(path, data=None):
        url = "http://{}:{}{}".format(*detector.controller_address, path)
        request = Request(url, data, {"Authorization": "Bearer s3cret"})
        return urlopen(request, timeout=120).read().decode()

    states = [detector.report(1e12, 1), detector.enabled]
    if detector.my_rank == 0:
        for _ in range(3):
            ask("/")
        answer = ask("/on", b"")
        assert answer.split()[3] == "ON"
    dist.barrier()
    detector.report(1e12, 1)
    states.append(detector.enabled and not detector.toggle)
    spend(detector, 5)
    detector.report(1e12, 1)
    metrics = ""
    if detector.my_rank == 0:
        metrics = ask("/metrics")
        ask("/toggle", b"")
    dist.barrier()
    detector._check_toggle()
    states.append(detector.enabled)
    states.append(detector.toggle)  # all ranks want what rank 0 has been asked for
    address = detector.controller_address
    StragglerDetector.reset_singleton()
    return states, address is not None, metrics, detector.last_report is None


def test_requests_reach_every_rank():
    (first, listens, metrics, _), (second, other_listens, *_) = run_ranks(toggled_over_http, 2)
    assert first == second == [False, False, True, False, False]
    assert (listens, other_listens) == (True, False)
    assert 'mcore_straggler_iteration_seconds{rank="1",host="' in metrics


def different_arguments():
    """Flops, intervals, ranges and states that differ between the ranks."""
    records = Records()
    detector = configured(enabled=dist.get_rank() == 0)
    has_logged = [detector.report(1e12 if detector.my_rank == 0 else 0.0, 10)]
    both_on = detector.enabled
    spend(detector, 10)
    has_logged.append(detector.report(1e12 if detector.my_rank == 0 else 0.0, 10))
    zero_flops = detector.last_report.metrics
    spend(detector, 10)
    has_logged.append(detector.report(1e12, 10 if detector.my_rank == 0 else 0))
    no_interval = detector.last_report.metrics
    last = detector.last_report
    has_logged.append(detector.report(1e12, 0 if detector.my_rank == 0 else 10))
    return has_logged, both_on, zero_flops, no_interval, detector.last_report is last, records.lines


def test_ranks_may_differ_without_a_hang():
    results = run_ranks(different_arguments, 2)
    assert [has_logged for has_logged, *_ in results] == [[True, True, True, False], [False] * 4]
    for _, both_on, zero_flops, no_interval, is_kept, _ in results:
        assert both_on
        assert zero_flops["elapsed_ms"] == (1.0, 1.0)
        assert zero_flops["etpt_tf"] == (1e12 / (10 * 1e9 * 2 * 3), 0.0)
        assert no_interval["elapsed_ms"][0] == 1.0
        assert math.isnan(no_interval["elapsed_ms"][1])
        assert is_kept
    warnings = [text for level, text in results[0][-1] if level == "WARNING"]
    assert warnings[0].startswith("straggler: rank 0 is ON and 1 other ranks are not (1)")
    assert results[1][-1] == []


def off_on_rank_0():
    records = Records()
    detector = configured(enabled=dist.get_rank() != 0)
    spend(detector, 10)
    detector.report(1e12, 10)
    return detector.enabled, detector.last_report, records.lines


def test_the_state_of_rank_0_wins():
    (first, report, lines), (second, *_) = run_ranks(off_on_rank_0, 2)
    assert (first, second, report) == (False, False, None)
    assert lines[0][0] == "WARNING"


def other_sections(names_of_rank_1):
    names = ["a", "b"] if dist.get_rank() == 0 else names_of_rank_1
    detector = configured(sections=names)
    try:
        detector.report(1e12, 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("names", [["a", "c"], ["b", "a"], ["a"], ["a", "b", "c"]])
def test_other_sections_are_an_error_on_all_ranks(names):
    """Also where there are more or fewer, so that the rows would not have the same length."""
    texts = run_ranks(other_sections, 2, names)
    assert len(set(texts)) == 1
    assert "ranks [1] differ from rank 0 in the sections" in texts[0]


def three_of_four_differ():
    """The ranks that are given need not be those of the group."""
    rank = 3 - dist.get_rank()
    detector = configured(rank=rank, sections=["b" if rank in (1, 3) else "a"])
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] differ from rank 0"):
        detector.report(1e12, 1)
    return True


def test_all_that_differ_are_named():
    assert run_ranks(three_of_four_differ, 4) == [True] * 4


def changed_sections():
    """A rank that sends another hash in a later report."""
    detector = configured(sections=["a"])
    detector.report(1e12, 1)
    if detector.my_rank == 1:
        detector._reporter.exchange.sections_hash += 1
    with pytest.raises(RuntimeError, match=r"ranks \[1\] differ"):
        detector.report(1e12, 1)
    return True


def test_sections_are_compared_in_every_report():
    assert run_ranks(changed_sections, 2) == [True, True]


def same_rank_twice():
    detector = configured(rank=0)
    with pytest.raises(RuntimeError, match=r"\[0, 0\]"):
        detector.report(1e12, 1)
    with pytest.raises(RuntimeError, match=r"\[0, 0\]"):
        detector.report(1e12, 1)
    return True


def test_every_rank_has_its_own_number():
    assert run_ranks(same_rank_twice, 2) == [True, True]


def permuted_ranks():
    detector = configured(rank=1 - dist.get_rank())
    spend(detector, 10 if dist.get_rank() == 0 else 20)
    has_logged = detector.report(1e12, 1)
    report = detector.last_report
    return has_logged, report.metrics["elapsed_ms"], report.ranks, report.outliers[0].rank


def test_group_order_and_given_ranks():
    results = run_ranks(permuted_ranks, 2)
    assert [has_logged for has_logged, *_ in results] == [False, True]
    for _, *rest in results:
        assert rest == [(10.0, 20.0), (1, 0), 0]


def pairs_of_four():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    detector = StragglerDetector()
    with pytest.raises(ValueError, match="world is 4, but the process group has 2"):
        detector.configure(4, dist.get_rank(), group=group, controller=False)
    with pytest.raises(ValueError, match="not a member"):
        detector.configure(2, 0, group=dist.GroupMember.NON_GROUP_MEMBER, controller=False)
    detector.configure(2, dist.get_rank(group), group=group, enabled=True, controller=False)
    spend(detector, 1 + dist.get_rank())
    detector.report(1e12, 1)
    return detector.last_report.metrics["elapsed_ms"]


def test_groups_report_on_their_own():
    results = run_ranks(pairs_of_four, 4)
    assert results == [(1.0, 3.0), (2.0, 4.0), (1.0, 3.0), (2.0, 4.0)]


class Collectives(TorchDispatchMode):
    """Notes the dtype that each collective sends, by whatever function it was called."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.dtypes.append(tensors[0].dtype)
        return func(*args, **(kwargs or {}))


def counted_collectives():
    detector = configured(sections=["a"], mmcnt=2)
    waits = []
    detector._ranges.take = lambda take=detector._ranges.take: waits.append(1) or take()
    counts = []
    for enabled in (True, True, False, False):
        detector._set_enabled(enabled)
        detector._state.request(enabled)
        with Collectives() as collectives:
            detector.report(1e12, 1)
        counts.append(collectives.dtypes)
    return counts, len(waits)


def test_one_collective_a_report():
    for counts, num_waits in run_ranks(counted_collectives, 2):
        assert counts[0] == [torch.uint8, torch.float64]
        assert counts[1:] == [[torch.float64]] * 3
        assert num_waits == 2


def both_ways_to_gather():
    """What gloo ranks hear directly, and through the all-gather that other backends use."""
    detector = configured(sections=["a"])
    heard = []
    for has_gloo in (True, False):
        assert detector._reporter.exchange._has_gloo
        detector._reporter.exchange._has_gloo = has_gloo
        spend(detector, 10 + detector.my_rank)
        spend(detector, 2, detector.section("a"))
        detector.report(1e12, 10)
        report = detector.last_report.to_dict()
        report.pop("unix_time")
        heard.append(report)
        detector._reporter.exchange._has_gloo = True
    return heard


def test_all_gather_and_all_to_all_say_the_same():
    results = run_ranks(both_ways_to_gather, 3)
    first = results[0][0]
    assert first["metrics"]["elapsed_ms"] == [1.0, 1.1, 1.2]
    assert first["sections"]["a"][2]["sum_ms"] == 2.0
    assert all(report == first for heard in results for report in heard)


def extremes_of_two():
    detector = configured()
    rank = detector.my_rank
    data = detector._min_max(20.0 + rank, 1.0, 60.0 - rank, NAN, 97.0, 1980.0, 8.0 + rank)
    if data is None:
        return None
    values = data.max_elapsed, data.min_temp, data.max_power, data.min_util, *data.aflops
    return [str(value) for value in values]


def test_min_max_of_two_ranks():
    assert run_ranks(extremes_of_two, 2) == [
        ["21.00ms/1", "59.00C/1", "nanW/-1", "97.00%/0", "8.00TF/0", "9.00TF/1"],
        None,
    ]


def configured_again_on_one_rank():
    detector = configured()
    detector.report(1e12, 1)
    if detector.my_rank == 1:
        detector.configure(2, 1, enabled=False)
    same = StragglerDetector()
    same.report(1e12, 1)
    return same is detector, same.enabled, same.last_report.world_size


def test_constructing_again_on_one_rank_changes_nothing():
    assert run_ranks(configured_again_on_one_rank, 2) == [(True, True, 2)] * 2


def closed_on_one_rank():
    detector = configured()
    if detector.my_rank == 1:
        detector.close()
    spend(detector, 5)
    detector.report(1e12, 1)
    elapsed = detector.last_report.metrics["elapsed_ms"]
    if detector.my_rank == 0:
        detector.close()
    detector.report(1e12, 1)
    return elapsed[0], math.isnan(elapsed[1]), detector.enabled


def test_a_closed_detector_still_takes_part():
    assert run_ranks(closed_on_one_rank, 2) == [(5.0, True, False)] * 2


def dies_in_a_report():
    detector = configured()
    detector.report(1e12, 1)
    if detector.my_rank == 1:
        os._exit(3)
    detector.report(1e12, 1)


def test_a_rank_that_dies_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("rank_testing.watch.GRACE_S", 60.0)  # for rank 0 to notice
    with pytest.raises(RankFailure) as failure:
        run_ranks(dies_in_a_report, 2, timeout_s=180)
    by_rank = {one.rank: one for one in failure.value.ranks}
    assert by_rank[1].kind == "died"
    text = str(failure.value)
    assert "straggler report: gathering from 2 ranks failed on rank 0" in text


def hangs_in_a_report(path):
    group = dist.new_group()
    detector = configured(group=group)
    detector.report(1e12, 1)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=2), group)
    if detector.my_rank == 1:
        give_up_at = time.monotonic() + 120
        while not path.exists() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        return path.exists()
    with pytest.raises(RuntimeError, match="a rank died, hangs, was configured twice"):
        detector.report(1e12, 1)
    path.touch()
    return True


def test_a_rank_that_hangs_is_bounded_by_the_groups_timeout(tmp_path):
    assert run_ranks(hangs_in_a_report, 2, tmp_path / "rank0_gave_up", timeout_s=180) == [
        True,
        True,
    ]


def report_and_destroy_the_group():
    detector = configured()
    with detector:
        pass
    detector.report(1e12, 1)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(RuntimeError, match="process group has been destroyed"):
        detector.report(1e12, 1)
    return group() is None


def test_a_detector_does_not_keep_a_destroyed_group_alive():
    assert run_ranks(report_and_destroy_the_group, 2) == [True, True]
