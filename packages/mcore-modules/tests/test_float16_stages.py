from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.modules import (
    Float16Module,
    MegatronModule,
)
from mcore.modules.float16 import stage_flags
from mcore.parallel import ProcessGroups, use_process_groups
from rank_testing import run_ranks

BF16 = SimpleNamespace(bf16=True)


class Recorder(MegatronModule):
    """Linear(2, 1) that records what it is called with."""

    def __init__(self, make_output=lambda logits: logits):
        super().__init__(None)
        self.linear = torch.nn.Linear(2, 1)
        self.make_output = make_output

    def forward(self, x, **kwargs):
        self.seen = {"x": x, **kwargs}
        return self.make_output(self.linear(x.to(self.linear.weight.dtype)))


def test_pipeline_without_a_group_is_refused():
    config = SimpleNamespace(bf16=True, pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="pipeline_model_parallel_size is 2"):
        Float16Module(config, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "options", [{"vp_stage": 1}, {"vp_size": 2}, {"vp_size": 2, "vp_stage": 2}]
)
def test_stages_are_checked_at_construction(options):
    with pytest.raises(ValueError, match="vp_stage"):
        Float16Module(BF16, torch.nn.Linear(1, 1), **options)


def test_stage_and_size_come_from_module_and_config():
    module = Recorder()
    module.vp_stage = 1
    outer = torch.nn.Module()
    outer.module = module
    config = SimpleNamespace(bf16=True, virtual_pipeline_model_parallel_size=2)
    model = Float16Module(config, outer)
    assert (model.vp_stage, model.vp_size) == (1, 2)


def casts(model):
    out = model(torch.ones(1, 2))
    return model.module.seen["x"].dtype is torch.bfloat16, out.dtype is torch.float32


def test_stage_and_size_can_be_set_later():
    model = Float16Module(BF16, Recorder(), vp_size=2, vp_stage=0)
    assert casts(model) == (True, False)
    model.vp_stage = 1
    assert casts(model) == (False, True)
    with pytest.raises(ValueError, match="vp_stage is 2"):
        model.vp_stage = 2
    assert (model.vp_stage, casts(model)) == (1, (False, True))
    model.vp_size = 3
    assert casts(model) == (False, False)


def pipeline_casts(vp_size, vp_stage, how):
    group = dist.group.WORLD
    collection = SimpleNamespace(pp=group)
    module = Recorder()
    options = {}
    if how == "argument":
        options["pp_group"] = group
    elif how == "collection":
        options["pg_collection"] = collection
    else:
        module.pg_collection = collection
    if how == "module behind":
        options["pg_collection"] = SimpleNamespace(pp=None)
    config = SimpleNamespace(bf16=True, pipeline_model_parallel_size=2)
    return casts(Float16Module(config, module, vp_size=vp_size, vp_stage=vp_stage, **options))


@pytest.mark.parametrize("how", ["argument", "collection", "module", "module behind"])
def test_two_pipeline_ranks(how):
    assert run_ranks(pipeline_casts, 2, None, None, how) == [(True, False), (False, True)]


def interleaved_casts():
    return [pipeline_casts(2, stage, "argument") for stage in (0, 1)]


def test_two_pipeline_ranks_with_two_chunks():
    assert run_ranks(interleaved_casts, 2) == [
        [(True, False), (False, False)],
        [(False, False), (False, True)],
    ]


def wrap_outside_the_group():
    group = dist.new_group([0])
    try:
        Float16Module(BF16, torch.nn.Linear(1, 1), pp_group=group)
    except ValueError as error:
        return str(error)
    return "wrapped"


def test_a_group_without_this_rank_is_refused():
    inside, outside = run_ranks(wrap_outside_the_group, 2)
    assert inside == "wrapped"
    assert "rank 1 is not a member" in outside


@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("vp_size", [None, 1, 2, 3])
def test_exactly_one_chunk_of_the_pipeline_is_first_and_one_is_last(pp_size, vp_size):
    stages = range(vp_size) if vp_size and vp_size > 1 else [None]
    places = [(rank, stage) for stage in stages for rank in range(pp_size)]
    flags = {place: stage_flags(place[0], pp_size, place[1], vp_size) for place in places}
    assert [place for place in places if flags[place][0]] == [places[0]]
    assert [place for place in places if flags[place][1]] == [places[-1]]


@pytest.mark.parametrize(
    ("vp_stage", "vp_size"),
    [(1, None), (1, 1), (-1, None), (None, 2), (2, 2), (-1, 2)],
)
def test_stages_that_do_not_fit_are_refused(vp_stage, vp_size):
    with pytest.raises(ValueError, match="vp_stage is"):
        stage_flags(0, 1, vp_stage, vp_size)


def test_stage_zero_of_a_single_chunk_is_fine():
    assert stage_flags(0, 1, 0, None) == stage_flags(0, 1, None, 1) == (True, True)


def places_by_source():
    """Which of pipelines of one and of two ranks decides, where several are given."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    two = dist.group.WORLD
    found = {}
    for name, own, options, default in (
        ("argument", two, {"pp_group": alone, "pg_collection": SimpleNamespace(pp=two)}, None),
        ("collection", two, {"pg_collection": SimpleNamespace(pp=alone)}, None),
        ("collection of two", alone, {"pg_collection": SimpleNamespace(pp=two)}, None),
        ("module", alone, {}, ProcessGroups.from_sizes(pp=2)),
        ("empty collection", alone, {"pg_collection": SimpleNamespace(pp=None)}, None),
        ("default", None, {}, ProcessGroups.from_sizes(pp=2)),
    ):
        module = Recorder()
        module.pg_collection = SimpleNamespace(pp=own)
        with use_process_groups(default):
            found[name] = casts(Float16Module(BF16, module, **options))
    return found


def test_the_nearest_pipeline_group_decides():
    whole = dict.fromkeys(("argument", "collection", "module", "empty collection"), (True, True))
    first, last = run_ranks(places_by_source, 2)
    cut = dict.fromkeys(("collection of two", "default"), (True, False))
    assert first == {**whole, **cut}
    assert last == {**whole, **dict.fromkeys(cut, (False, True))}
