"""The default groups: restored, shared between threads, never stale, taken with a warning."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch.distributed as dist

from mcore.parallel import (
    ProcessGroups,
    clear_default_process_groups,
    get_default_process_groups,
    get_tensor_model_parallel_group_if_none,
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


def tp_group_cases() -> dict[str, object]:
    found: dict[str, object] = {"no default": get_tensor_model_parallel_group_if_none(None)}
    own = dist.group.WORLD
    pgs = ProcessGroups.from_sizes(tp=2, expt_tp=1)
    with use_process_groups(pgs), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["own"] = get_tensor_model_parallel_group_if_none(own) is own
        found["warnings for own"] = len(caught)
        for _ in range(3):  # one call site in a hot loop
            found["default"] = get_tensor_model_parallel_group_if_none(None) is pgs.tp
        found["warnings"] = [(item.category.__name__, item.filename) for item in caught]
        found["expert"] = get_tensor_model_parallel_group_if_none(None, True) is pgs.expt_tp
        found["warnings after another line"] = len(caught)
    return found


def test_default_tp_group_warns_once_per_call_site_on_rank_0() -> None:
    first, second = run_ranks(tp_group_cases, 2)
    expected = {"no default": None, "own": True, "default": True, "expert": True}
    quiet = {"warnings for own": 0, "warnings": [], "warnings after another line": 0}
    assert second == {**expected, **quiet}
    assert first == {
        **expected,
        "warnings for own": 0,
        "warnings": [("DeprecationWarning", __file__)],
        "warnings after another line": 2,
    }


def test_a_new_world_warns_again_but_a_new_block_does_not(fake_world) -> None:
    counts = []
    for _ in range(2):
        fake_world(0, 2)
        pgs = ProcessGroups.from_sizes(tp=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                with use_process_groups(pgs):
                    get_tensor_model_parallel_group_if_none(None)
        counts.append([str(item.message) for item in caught if item.category is DeprecationWarning])
    assert [len(messages) for messages in counts] == [1, 1]
    assert "Pass tp_group explicitly" in counts[0][0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_default_without_the_group_names_the_field(fake_world) -> None:
    fake_world(0, 2)
    with use_process_groups(ProcessGroups()):
        for is_expert, name in ((False, "tp"), (True, "expt_tp")):
            with pytest.raises(RuntimeError, match=rf"no {name} group"):
                get_tensor_model_parallel_group_if_none(None, is_expert)
            assert get_tensor_model_parallel_group_if_none(None, is_expert, False) is None


def test_tp_group_without_distributed_and_for_non_members(fake_world) -> None:
    given = object()
    with use_process_groups(ProcessGroups()):
        assert get_tensor_model_parallel_group_if_none(given) is None
    fake_world(1, 2)
    assert get_tensor_model_parallel_group_if_none(given) is given
    with pytest.raises(ValueError, match="rank 1 is not a member"):
        get_tensor_model_parallel_group_if_none(dist.new_group([0]))
