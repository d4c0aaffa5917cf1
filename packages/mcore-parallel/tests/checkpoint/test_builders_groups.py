"""The groups of a sharded state dict: which are taken, and when a guess is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
from mcore.parallel.checkpoint.builders import ONE_RANK, resolve_groups
from mcore.parallel.process_groups import ProcessGroups, use_process_groups


class Place:
    """A stand-in for a group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


UNSPLIT = (1, 1)


def test_given_groups_come_before_the_default(fake_world: Any) -> None:
    fake_world(5, 8)
    tp, dp_cp = Place(0, 2), Place(1, 4)
    default = ProcessGroups.from_sizes(tp=4)
    with use_process_groups(default):
        assert resolve_groups(tp, dp_cp) == (tp, dp_cp)
        assert resolve_groups(tp, None) == (tp, default.dp_cp)
        assert resolve_groups(None, dp_cp, model_sizes=UNSPLIT) == (default.tp, dp_cp)


def test_one_process_has_groups_of_one_rank(fake_world: Any) -> None:
    assert resolve_groups(None, None) == (ONE_RANK, ONE_RANK)
    fake_world(0, 1)
    assert resolve_groups(None, None, model_sizes=(2, 2)) == (ONE_RANK, ONE_RANK)


def test_a_model_that_names_no_group_is_replicated_over_the_world(fake_world: Any) -> None:
    fake_world(5, 8)
    world = dist.group.WORLD
    assert resolve_groups(None, None, model_sizes=UNSPLIT) == (ONE_RANK, world)
    tp = Place(0, 1)
    assert resolve_groups(tp, None, model_sizes=UNSPLIT) == (tp, world)


def test_a_tensor_that_names_no_group_is_refused(fake_world: Any) -> None:
    fake_world(5, 8)
    with pytest.raises(RuntimeError, match="tp_group is not given"):
        make_sharded_tensor_for_checkpoint(torch.zeros(1), "k")
    with pytest.raises(RuntimeError, match="dp_cp_group is not given"):
        make_sharded_tensor_for_checkpoint(torch.zeros(1), "k", tp_group=Place(0, 1))


def test_groups_that_fill_the_world_leave_one_rank(fake_world: Any) -> None:
    fake_world(5, 8)
    whole, half, stages = Place(5, 8), Place(1, 4), Place(1, 2)
    for sizes in (None, UNSPLIT):
        assert resolve_groups(whole, None, model_sizes=sizes) == (whole, ONE_RANK)
        assert resolve_groups(None, whole, model_sizes=sizes) == (ONE_RANK, whole)
        assert resolve_groups(half, None, pp_group=stages, model_sizes=sizes) == (half, ONE_RANK)
    assert resolve_groups(half, None, model_sizes=(4, 2)) == (half, ONE_RANK)


def test_replicas_of_one_pipeline_stage_need_no_tensor_parallel_group(fake_world: Any) -> None:
    fake_world(5, 8)
    dp_cp = Place(1, 4)
    for sizes in (UNSPLIT, (1, 2)):
        assert resolve_groups(None, dp_cp, model_sizes=sizes) == (ONE_RANK, dp_cp)


@pytest.mark.parametrize(
    ("groups", "options", "missing"),
    [
        ((Place(0, 2), None), {"model_sizes": UNSPLIT}, "dp_cp_group"),
        ((None, None), {"model_sizes": (2, 1)}, "tp_group"),
        ((None, Place(0, 4)), {"model_sizes": (2, 1)}, "tp_group"),
        ((None, None), {"model_sizes": (1, 2)}, "dp_cp_group"),
        ((None, None), {"model_sizes": UNSPLIT, "pp_group": Place(0, 2)}, "dp_cp_group"),
    ],
)
def test_an_unknown_group_of_a_split_model_is_refused(
    fake_world: Any, groups: Any, options: Any, missing: str
) -> None:
    fake_world(5, 8)
    with pytest.raises(RuntimeError, match=rf"{missing} is not given.*8 ranks") as caught:
        resolve_groups(*groups, **options)
    assert isinstance(caught.value, ValueError)
    assert f"metadata['{missing}']" in str(caught.value)


def test_a_tensor_with_a_replica_id_needs_no_replicas(fake_world: Any) -> None:
    fake_world(5, 8)
    tp = Place(0, 2)
    assert resolve_groups(tp, None, need_dp_cp=False) == (tp, ONE_RANK)
    with pytest.raises(RuntimeError, match="tp_group is not given"):
        resolve_groups(None, None, need_dp_cp=False)
