import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mcore.modules import GraphableMegatronModule, LinearForLastLayer, MegatronModule
from mcore.modules.traversal import iter_modules


class Layer(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def tree(config, **attributes):
    root = MegatronModule(config)
    root.first = Layer(**attributes)
    root.nested = torch.nn.ModuleList([Layer(**attributes), torch.nn.Linear(1, 1)])
    return root


def test_config_is_stored_as_it_is():
    config = object()
    assert MegatronModule(config).config is config
    assert MegatronModule(None).config is None


def test_state_dict_for_save_checkpoint_is_the_state_dict():
    root = tree(None)
    saved = root.state_dict_for_save_checkpoint(prefix="p.", keep_vars=True)
    assert list(saved) == ["p.nested.1.weight", "p.nested.1.bias"]
    assert saved["p.nested.1.weight"] is root.nested[1].weight


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(fp8="e4m3"),
        SimpleNamespace(fp4="e2m1"),
        SimpleNamespace(use_kitchen=True),
        SimpleNamespace(quant_recipe=object()),
    ],
)
def test_first_microbatch_is_set_below_when_quantisation_is_on(config):
    root = tree(config, is_first_microbatch=False)
    root.is_first_microbatch = False
    root.set_is_first_microbatch()
    assert root.is_first_microbatch is root.first.is_first_microbatch is True
    assert root.nested[0].is_first_microbatch is True
    assert not hasattr(root.nested[1], "is_first_microbatch")


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(),
        SimpleNamespace(fp8=None, fp4=None, use_kitchen=False, quant_recipe=None),
        SimpleNamespace(fp8=False),
        SimpleNamespace(fp8="", fp4=0),
        None,
    ],
)
def test_first_microbatch_is_left_alone_when_quantisation_is_off(config):
    root = tree(config, is_first_microbatch=False)
    root.set_is_first_microbatch()
    assert root.first.is_first_microbatch is False


def test_first_microbatch_reaches_properties_shared_and_replaced_modules():
    class Property(torch.nn.Module):
        value = False
        sets = 0

        @property
        def is_first_microbatch(self):
            return self.value

        @is_first_microbatch.setter
        def is_first_microbatch(self, value):
            self.value = value
            self.sets += 1

    root = tree(SimpleNamespace(fp8="hybrid"), is_first_microbatch=False)
    root.set_is_first_microbatch()
    root.first = root.also_first = Property()
    root.set_is_first_microbatch()
    assert root.first.is_first_microbatch is True
    assert root.first.sets == 1


def test_symmetric_ar_is_set_on_all_eligible_modules_each_time():
    root = tree(None, symmetric_ar_type=None)
    root.symmetric_ar_type = None
    root.second = Layer(symmetric_ar_type="two_shot")
    eligible = [root, root.first, root.second, root.nested[0]]
    for choice in ("two_shot", None, "one_shot", "multimem_all_reduce"):
        root.set_symmetric_ar(choice)
        for module in eligible:
            assert module.symmetric_ar_type == choice


def test_symmetric_ar_reaches_modules_added_later_and_nested_megatron_modules():
    root, child = MegatronModule(None), MegatronModule(None)
    root.child = child
    child.symmetric_ar_type = None
    root.set_symmetric_ar("two_shot")
    root.added = Layer(symmetric_ar_type=None)
    root.set_symmetric_ar("one_shot")
    assert root.added.symmetric_ar_type == "one_shot"
    child.set_symmetric_ar(None)
    assert child.symmetric_ar_type is None
    assert root.added.symmetric_ar_type == "one_shot"


def test_unknown_symmetric_ar_is_refused_and_changes_nothing():
    root = tree(None, symmetric_ar_type="one_shot")
    with pytest.raises(ValueError, match=r"foo.*two_shot.*one_shot.*multimem_all_reduce.*None"):
        root.set_symmetric_ar("foo")
    assert root.first.symmetric_ar_type == "one_shot"


def test_refresh_cache_does_nothing():
    assert MegatronModule(None).refresh_cache() is None


def test_copies_are_independent_and_respect_getstate():
    class Forgetful(MegatronModule):
        def __getstate__(self):
            return {**vars(self), "scratch": None}

    root = tree(SimpleNamespace(fp8="e4m3"), is_first_microbatch=False)
    root.forgetful = Forgetful(None)
    root.forgetful.scratch = object()
    root.tied = root.nested[1]
    copied = copy.deepcopy(root)
    assert copied.config is not root.config
    assert copied.forgetful.scratch is None
    assert copied.tied is copied.nested[1] is not root.tied
    assert torch.equal(copied.tied.weight, root.tied.weight)
    copied.set_is_first_microbatch()
    assert root.first.is_first_microbatch is False


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")]
)
@pytest.mark.parametrize(
    "make",
    [MegatronModule, GraphableMegatronModule, lambda _: LinearForLastLayer(4, 1, False)],
)
def test_a_copy_of_a_wrapper_that_forwards_attributes_is_a_wrapper(make, wrap):
    wrapped = wrap(make(None))
    model = torch.nn.Sequential(wrapped, torch.nn.Identity())
    for copied in (copy.deepcopy(wrapped), copy.deepcopy(model)[0]):
        assert type(copied) is type(wrapped)
        kinds = [type(module) for module in wrapped.modules()]
        assert [type(module) for module in copied.modules()] == kinds


def test_a_pickle_of_a_module_names_no_private_class():
    data = pickle.dumps([MegatronModule(None), LinearForLastLayer(4, 1, True)])
    assert b"Sharing" not in data
    assert pickle.loads(data)[1].weight.sequence_parallel


def test_walk_visits_the_modules_of_torch_in_its_order():
    shared = torch.nn.Linear(1, 1)
    root = torch.nn.Sequential(
        torch.nn.Sequential(shared, torch.nn.Identity()), shared, torch.nn.ModuleDict({"x": shared})
    )
    root.register_module("absent", None)
    assert list(iter_modules(root)) == list(root.modules())
