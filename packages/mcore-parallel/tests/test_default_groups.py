"""The default slot: restored, shared between threads, never stale."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch.distributed as dist

from mcore.parallel.process_groups import (
    ProcessGroups,
    clear_default_process_groups,
    get_default_process_groups,
    set_default_process_groups,
    use_process_groups,
)
from rank_testing import run_ranks


def test_set_returns_the_previous_default() -> None:
    first, second = ProcessGroups(), ProcessGroups()
    assert set_default_process_groups(first) is None
    assert set_default_process_groups(second) is first
    assert get_default_process_groups() is second
    assert set_default_process_groups(None) is second
    assert get_default_process_groups() is None
    set_default_process_groups(first)
    clear_default_process_groups()
    assert get_default_process_groups() is None


def test_use_restores_the_previous_default_also_on_errors() -> None:
    outer, inner = ProcessGroups(), ProcessGroups()
    with use_process_groups(outer):
        with use_process_groups(inner) as active:
            assert active is inner
            assert get_default_process_groups() is inner
        assert get_default_process_groups() is outer
        with pytest.raises(KeyError), use_process_groups(inner):
            raise KeyError
        assert get_default_process_groups() is outer
        with use_process_groups(None):
            assert get_default_process_groups() is None
        assert get_default_process_groups() is outer
    assert get_default_process_groups() is None


def test_other_threads_see_the_default() -> None:
    seen = []
    with use_process_groups(ProcessGroups()) as pgs:
        thread = threading.Thread(target=lambda: seen.append(get_default_process_groups()))
        thread.start()
        thread.join()
    assert seen[0] is pgs


def default_after_a_new_world() -> list[object]:
    found: list[object] = []
    set_default_process_groups(ProcessGroups.from_sizes(tp=2))
    found.append(get_default_process_groups() is not None)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found += [get_default_process_groups() is None for _ in range(3)]
    found.append([str(item.message).split(" ")[2] for item in caught])
    found.append((rank, size))
    return found


def test_default_of_an_earlier_world_is_dropped_with_one_warning() -> None:
    results = run_ranks(default_after_a_new_world, 2)
    common = [True, True, True, True, ["ProcessGroups"]]
    assert results == [[*common, (0, 2)], [*common, (1, 2)]]


def test_setting_over_a_stale_default_is_quiet(fake_world) -> None:
    fake_world(0, 2)
    set_default_process_groups(ProcessGroups.from_sizes(tp=2))
    fake_world(0, 4)
    fresh = ProcessGroups.from_sizes(tp=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set_default_process_groups(fresh) is None
        assert get_default_process_groups() is fresh


def test_default_that_became_stale_inside_use_is_not_restored(fake_world) -> None:
    fake_world(0, 2)
    set_default_process_groups(ProcessGroups.from_sizes(tp=2))
    with use_process_groups(None):
        fake_world(0, 2)
    with pytest.warns(RuntimeWarning, match="no longer exists"):
        assert get_default_process_groups() is None


def test_default_set_before_initialisation_is_stale_after_it(fake_world) -> None:
    set_default_process_groups(ProcessGroups.from_sizes())
    fake_world(0, 2)
    with pytest.warns(RuntimeWarning, match="set_default_process_groups"):
        assert get_default_process_groups() is None
