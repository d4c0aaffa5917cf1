import dataclasses
import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mcore.modules import (
    Float16Module,
    MegatronModule,
    from_megatron_sharded_state_dict,
    sharded_state_dict_of,
    to_megatron_sharded_state_dict,
)
from mcore.parallel.checkpoint import (
    ShardedObject,
    ShardedTensor,
    load_sharded_state_dict,
    make_sharded_tensors_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.process_groups import ProcessGroups, use_process_groups
from rank_testing import run_ranks


class Split(MegatronModule):
    """A weight split over the tensor-parallel group and a replicated bias."""

    def __init__(self, tp_group=None):
        super().__init__(None)
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))
        self.bias = torch.nn.Parameter(torch.zeros(4))
        if tp_group is not None:
            self.tp_group = tp_group

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        self.metadata = metadata
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=getattr(self, "tp_group", metadata["tp_group"]),
            dp_cp_group=metadata["dp_cp_group"],
        )


class WithEverything(MegatronModule):
    def __init__(self):
        super().__init__(None)
        self.own = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.linear = torch.nn.Linear(2, 1)
        self.absent = None
        self.register_module("none", None)

    def get_extra_state(self):
        return {"step": 3}

    def set_extra_state(self, state):
        pass


def places(entries):
    return {
        key: (entry.global_shape, entry.global_offset, entry.replica_id)
        for key, entry in entries.items()
    }


def test_keys_shapes_and_live_data_of_one_process():
    root = MegatronModule(None)
    root.linear = torch.nn.Linear(2, 1)
    entries = root.sharded_state_dict(prefix="m.")
    assert set(entries) == {"m.linear.weight", "m.linear.bias"}
    weight = entries["m.linear.weight"]
    assert weight.local_shape == weight.global_shape == (1, 2)
    assert weight.global_offset == (0, 0)
    assert weight.replica_id == (0, 0, 0)
    assert weight.data is root.linear.weight
    assert all(entry.key == key for key, entry in entries.items())


def test_offsets_become_leading_axes():
    root = MegatronModule(None)
    root.linear = torch.nn.Linear(3, 2)
    weight = root.sharded_state_dict("", ((0, 1, 4),))["linear.weight"]
    assert weight.global_shape == (4, 2, 3)
    assert weight.global_offset == (1, 0, 0)
    assert weight.axis_fragmentations == (4, 1, 1)
    assert weight.prepend_axis_num == 1


def test_entries_are_those_of_the_state_dict():
    root = WithEverything()
    entries = root.sharded_state_dict()
    assert entries.keys() == root.state_dict().keys()
    assert entries["own"].data is root.own
    assert entries["kept"].data is root.kept
    extra = entries["_extra_state"]
    assert type(extra) is ShardedObject
    assert (extra.global_shape, extra.global_offset) == ((1,), (0,))
    assert extra.data == {"step": 3}


def test_shared_children_have_all_their_names():
    root = MegatronModule(None)
    root.a = root.b = torch.nn.Linear(1, 1)
    entries = root.sharded_state_dict()
    assert entries.keys() == root.state_dict().keys()
    assert entries["a.weight"].data is entries["b.weight"].data is root.a.weight


def test_meta_tensors_are_described():
    with torch.device("meta"):
        root = WithEverything()
    assert root.sharded_state_dict()["linear.weight"].global_shape == (1, 2)


def test_layers_in_a_plain_container_describe_themselves():
    root = MegatronModule(None)
    root.layers = torch.nn.ModuleList([Split(), Split()])
    root.layers.register_buffer("count", torch.zeros(1))
    entries = root.sharded_state_dict()
    assert entries.keys() == root.state_dict().keys()
    assert root.layers[1].metadata is not None


def test_metadata_is_handed_down_and_left_alone():
    root = MegatronModule(None)
    root.split = Split()
    metadata = {"note": [1]}
    root.sharded_state_dict(metadata=metadata)
    assert metadata == {"note": [1]}
    assert root.split.metadata["note"] is metadata["note"]
    assert {"tp_group", "dp_cp_group"} <= root.split.metadata.keys()


def test_hooks_of_the_module_run_on_its_own_entries():
    root = WithEverything()
    seen = []
    root.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(prefix))

    def rename(module, state, prefix, metadata):
        state[f"{prefix}renamed"] = state.pop(f"{prefix}own")
        seen.append(sorted(state))

    root.register_state_dict_post_hook(rename)
    entries = root.sharded_state_dict("p.")
    assert seen == ["", ["_extra_state", "kept", "renamed"]]
    assert entries["p.renamed"].data is root.own
    assert "p.own" not in entries


def test_a_hook_may_return_another_state_dict():
    root = WithEverything()
    kept = {"only": root.own}
    root._register_state_dict_hook(lambda module, state, prefix, metadata: kept)
    assert set(root.sharded_state_dict()) == {"only", "linear.weight", "linear.bias"}
    assert kept.keys() == {"only"}


def test_a_wrapper_that_hands_on_attributes_describes_itself():
    class HandsOn(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    root = MegatronModule(None)
    root.wrapped = HandsOn(Split())
    assert set(root.sharded_state_dict()) == {"wrapped.weight", "wrapped.bias"}


def test_entries_keep_the_order_of_the_state_dict():
    root = WithEverything()
    root.first, root.split, root.last = torch.nn.Linear(1, 1), Split(), torch.nn.BatchNorm1d(2)
    assert list(root.sharded_state_dict("p.")) == list(root.state_dict(prefix="p."))


def test_a_prefix_does_not_turn_tensors_into_extra_state():
    root = MegatronModule(None)
    root.state = torch.nn.Parameter(torch.zeros(2))
    assert type(root.sharded_state_dict("my_extra_")["my_extra_state"]) is ShardedTensor


def test_the_state_dict_of_a_child_is_the_one_it_defines():
    class Renaming(torch.nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {f"{kwargs.get('prefix', '')}kernel": self.weight}

    root = MegatronModule(None)
    root.child = Renaming(2, 1)
    assert set(root.sharded_state_dict("p.")) == {"p.child.kernel"}


def test_children_with_a_method_of_their_own_are_asked():
    class Wraps(MegatronModule):
        @functools.wraps(MegatronModule.sharded_state_dict)
        def sharded_state_dict(self, *args, **kwargs):
            return {f"{kwargs['prefix']}own": self}

    root = MegatronModule(None)
    root.plain, root.wraps, root.patched = MegatronModule(None), Wraps(None), MegatronModule(None)
    root.plain.inner = MegatronModule(None)
    root.plain.inner.linear = torch.nn.Linear(2, 1)
    root.patched.sharded_state_dict = lambda prefix, **_: {f"{prefix}patch": 1}
    keys = ["plain.inner.linear.weight", "plain.inner.linear.bias", "wraps.own", "patched.patch"]
    assert list(root.sharded_state_dict("p.")) == [f"p.{key}" for key in keys]


def test_the_model_in_a_wrapper_of_megatron_describes_itself():
    class Model(torch.nn.Linear):
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {f"{prefix}own": metadata["step"]}

    fields = {"__module__": "megatron.core.distributed"}
    wrapper = type("DistributedDataParallel", (torch.nn.Module,), fields)()
    wrapper.module = Model(2, 2)
    assert sharded_state_dict_of(wrapper, "m.", metadata={"step": 3}) == {"m.own": 3}
    # As before, a method may be written with the function: it does not call itself.
    assert sorted(sharded_state_dict_of(wrapper.module, "m.")) == ["m.bias", "m.weight"]
    wrapper.module = torch.nn.Linear(2, 2)
    assert sorted(sharded_state_dict_of(wrapper, "m.")) == ["m.bias", "m.weight"]


def test_neighbours_with_one_key_are_refused():
    root = MegatronModule(None)
    root.child = torch.nn.Linear(1, 1)
    root.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({"child.weight": torch.zeros(1)})
    )
    with pytest.raises(ValueError, match=r"'p\.child\.weight'"):
        root.sharded_state_dict("p.")


def test_a_tensor_with_the_key_of_a_child_whose_name_is_left_out_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self._orig_mod = torch.nn.Linear(1, 1)  # as if torch.compile had put it there

    root = MegatronModule(None)
    root.stack = torch.nn.Sequential(Odd())
    with pytest.raises(ValueError, match=r"'stack\.0\.weight'"):
        root.sharded_state_dict()


def test_two_entries_with_one_key_are_refused():
    class Greedy(MegatronModule):
        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {"own": "mine"}

    root = WithEverything()
    root.greedy = Greedy(None)
    with pytest.raises(ValueError, match="'own'"):
        root.sharded_state_dict()


@pytest.mark.parametrize("metadata", [[], "dp_cp_group", 3])
def test_metadata_is_a_dict(metadata):
    with pytest.raises(TypeError, match="metadata"):
        MegatronModule(None).sharded_state_dict(metadata=metadata)


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        (((0, 1),), TypeError),
        (((0, 1.0, 2),), TypeError),
        (((1, 0, 2),), ValueError),
        (((0, 0, 2), (0, 1, 2)), ValueError),
        (((0, 2, 2),), ValueError),
        (((0, -1, 2),), ValueError),
    ],
)
def test_bad_offsets_are_refused(offsets, error):
    with pytest.raises(error, match="sharded_offsets"):
        WithEverything().sharded_state_dict(sharded_offsets=offsets)


def model(tp_group=None):
    root = MegatronModule(None)
    root.own = torch.nn.Parameter(torch.zeros(5))
    root.layers = torch.nn.ModuleList([Split()])
    root.plain = torch.nn.Linear(1, 1, bias=False)
    if tp_group is not None:
        root.tp_group = tp_group
    return root


def describe_tensor_parallel(offsets):
    return places(model(dist.group.WORLD).sharded_state_dict("m.", offsets))


def describe_data_parallel():
    return places(model().sharded_state_dict())


def save_and_load_without_groups(folder):
    saved = model()
    torch.nn.init.constant_(saved.own, 1.0 + dist.get_rank())
    save_sharded_state_dict(saved.sharded_state_dict(), folder)
    loaded = model()
    state = load_sharded_state_dict(loaded.sharded_state_dict(), folder)
    loaded.load_state_dict(state)
    return loaded.own.tolist()


def describe_split_by_configuration(**sizes):
    root = MegatronModule(SimpleNamespace(**sizes))
    root.own = torch.nn.Parameter(torch.zeros(5))
    try:
        return places(root.sharded_state_dict())
    except RuntimeError as error:
        return str(error)


def describe_all_two(folder):
    return {
        "tp": describe_tensor_parallel(()),
        "layers": describe_tensor_parallel(((0, 1, 4),)),
        "dp": describe_data_parallel(),
        "loaded": save_and_load_without_groups(folder),
        "tp 2": describe_split_by_configuration(tensor_model_parallel_size=2),
        "pp 2": describe_split_by_configuration(pipeline_model_parallel_size=2),
        "tp 1": describe_split_by_configuration(tensor_model_parallel_size=1),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found."""
    return run_ranks(describe_all_two, 2, str(tmp_path_factory.mktemp("sharding") / "saved"))


def test_two_tensor_parallel_ranks(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert found["tp"] == {
            "m.own": ((5,), (0,), (0, rank, 0)),
            "m.layers.0.weight": ((4, 3), (2 * rank, 0), (0, 0, 0)),
            "m.layers.0.bias": ((4,), (0,), (0, rank, 0)),
            "m.plain.weight": ((1, 1), (0, 0), (0, rank, 0)),
        }
        assert found["layers"]["m.layers.0.weight"] == ((4, 4, 3), (1, 2 * rank, 0), (0, 0, 0))
        assert found["layers"]["m.layers.0.bias"] == ((4, 4), (1, 0), (0, rank, 0))


def test_two_data_parallel_ranks_without_groups_have_one_writer(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert {replica for _, _, replica in found["dp"].values()} == {(0, 0, rank)}
        assert found["loaded"] == [1.0] * 5


def test_a_configuration_that_splits_the_model_needs_the_group(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert "tp_group is not given" in found["tp 2"]
        assert found["pp 2"] == {"own": ((5,), (0,), (0, 0, 0))}  # a stage on each rank
        assert found["tp 1"] == {"own": ((5,), (0,), (0, 0, rank))}


def describe_four(how):
    groups = ProcessGroups.from_sizes(tp=2)
    root, metadata = model(), None
    if how == "collection":
        root.pg_collection = groups
    elif how == "metadata":
        metadata = {"tp_group": groups.tp, "dp_cp_group": groups.dp_cp}
    elif how == "metadata first":
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        root.pg_collection = SimpleNamespace(tp=groups.tp, dp_cp=alone)
        metadata = {"tp_group": alone, "dp_cp_group": groups.dp_cp}
    elif how == "unknown":
        root.tp_group = groups.tp
    elif how == "argument":
        metadata = {"dp_cp_group": groups.dp_cp}
        return places(sharded_state_dict_of(root, metadata=metadata, tp_group=groups.tp))
    if how == "default":
        with use_process_groups(groups):
            return places(root.sharded_state_dict())
    before = dict(metadata) if metadata else None
    try:
        entries = places(root.sharded_state_dict(metadata=metadata))
    except ValueError as error:
        return str(error)
    assert metadata == before
    return entries


def describe_child_with_a_group_of_its_own():
    groups = ProcessGroups.from_sizes(tp=2)
    root = model(groups.tp)
    root.pg_collection = groups
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    root.layers.append(Split(alone))
    return places(root.sharded_state_dict())


HOWS = ("collection", "metadata", "metadata first", "argument", "default")


def describe_all_four():
    found = {how: describe_four(how) for how in (*HOWS, "unknown")}
    return {**found, "child": describe_child_with_a_group_of_its_own()}


@pytest.fixture(scope="module")
def four_ranks():
    """What each of four ranks found, two by two."""
    return run_ranks(describe_all_four, 4)


@pytest.mark.parametrize("how", HOWS)
def test_four_ranks_two_by_two_however_the_groups_are_given(how, four_ranks):
    for rank, found in enumerate(four_ranks):
        tp_rank, dp_rank = rank % 2, rank // 2
        assert found[how]["layers.0.weight"] == ((4, 3), (2 * tp_rank, 0), (0, 0, dp_rank))
        assert found[how]["own"] == ((5,), (0,), (0, tp_rank, dp_rank))


def test_an_unknown_data_parallel_group_is_refused_on_all_ranks(four_ranks):
    assert all("metadata['dp_cp_group']" in found["unknown"] for found in four_ranks)


def test_a_child_with_a_group_of_its_own_keeps_it(four_ranks):
    for rank, found in enumerate(four_ranks):
        assert found["child"]["layers.0.weight"][0] == (4, 3)
        assert found["child"]["layers.1.weight"] == ((2, 3), (0, 0), (0, 0, rank // 2))


def test_entries_are_sharded_tensors():
    assert {type(entry) for entry in model().sharded_state_dict().values()} == {ShardedTensor}


@pytest.mark.parametrize(
    "wrapper",
    [torch.compile, checkpoint_wrapper, lambda module: checkpoint_wrapper(torch.compile(module))],
)
def test_children_in_wrappers_of_any_kind_have_the_keys_of_the_others(wrapper):
    def model(wrap):
        root = MegatronModule(None)
        root.linear = wrap(torch.nn.Linear(2, 2))
        child = MegatronModule(None)
        child.inner = wrap(torch.nn.Linear(2, 2))
        root.child = wrap(child)
        mixed = torch.nn.Sequential(MegatronModule(None), torch.nn.Linear(2, 2))
        mixed[0].weight = torch.nn.Parameter(torch.zeros(1))
        root.stack = torch.nn.Sequential(torch.nn.Identity(), wrap(torch.nn.Linear(2, 2)))
        root.mixed = wrap(mixed)
        root.my_orig_mod = wrap(torch.nn.Linear(2, 2))  # a name that only ends like a wrapper's
        return root

    plain, wrapped = model(lambda module: module), model(wrapper)
    expected = plain.sharded_state_dict("m.")
    found = wrapped.sharded_state_dict("m.")
    assert list(found) == list(expected) == list(plain.state_dict(prefix="m."))
    assert [entry.key for entry in found.values()] == list(expected)
    assert found["m.stack.1.weight"].data is wrapped.stack[1].weight
    assert list(sharded_state_dict_of(wrapper(wrapped))) == list(plain.sharded_state_dict())


def test_parameters_that_are_gathered_late_are_ready():
    module = MegatronModule(None)
    module.linear = torch.nn.Linear(2, 2)
    weight = module.linear.weight
    weight._ensure_param_ready_callback = lambda: weight.data.fill_(3)
    entry = module.sharded_state_dict()["linear.weight"]
    assert entry.data.tolist() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parameters_that_are_gathered_late_are_ready_in_a_plain_state_dict(is_wrapped):
    module = MegatronModule(None) if not is_wrapped else torch.nn.Module()
    module.linear = torch.nn.Linear(1, 1, bias=False)
    model = Float16Module(SimpleNamespace(bf16=True), module) if is_wrapped else module
    weight = module.linear.weight
    weight._ensure_param_ready_callback = lambda: setattr(weight, "data", torch.tensor([[3.0]]))
    assert model.state_dict_for_save_checkpoint()["linear.weight"].item() == 3.0


def test_a_checkpoint_with_activation_checkpointing_loads_without_it(tmp_path):
    def model(wrap, seed):
        torch.manual_seed(seed)
        inner = torch.nn.Sequential(MegatronModule(None), torch.nn.Linear(2, 2))
        inner[0].weight = torch.nn.Parameter(torch.rand(1))
        return Float16Module(SimpleNamespace(bf16=True), wrap(inner))

    source, target = model(checkpoint_wrapper, 0), model(lambda module: module, 1)
    save_sharded_state_dict(source.sharded_state_dict(), tmp_path / "a")
    loaded = load_sharded_state_dict(target.sharded_state_dict(), tmp_path / "a")
    assert sorted(loaded) == ["0.weight", "1.bias", "1.weight"]
    for name, tensor in source.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.fixture
def megatron(monkeypatch):
    """Entries like Megatron-LM's; those of the real one are tested beside the benchmarks."""
    module = ModuleType("megatron.core.dist_checkpointing.mapping")
    for name, names in (
        ("ShardedTensor", [field.name for field in dataclasses.fields(ShardedTensor)]),
        ("ShardedObject", [field.name for field in dataclasses.fields(ShardedObject)]),
        ("ShardedTensorFactory", ["key"]),
    ):
        made = dataclasses.make_dataclass(name, names)
        made.__module__ = module.__name__
        setattr(module, name, made)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_entries_of_mixed_models_are_converted_both_ways(megatron):
    root = MegatronModule(None)
    root.linear = torch.nn.Linear(3, 2)
    entries = root.sharded_state_dict("m.", ((0, 1, 4),))
    local = ShardedObject("o", {"a": 1}, (2,), (1,), 0)
    mixed = {"model": entries, "rest": [local, 7, (entries["m.linear.bias"],)]}
    theirs = to_megatron_sharded_state_dict(mixed)
    weight = theirs["model"]["m.linear.weight"]
    assert type(weight) is megatron.ShardedTensor
    assert (weight.global_shape, weight.global_offset) == ((4, 2, 3), (1, 0, 0))
    assert weight.data is root.linear.weight
    assert type(theirs["rest"][0]) is megatron.ShardedObject
    assert theirs["rest"][1] == 7
    assert type(theirs["rest"][2][0]) is megatron.ShardedTensor
    back = from_megatron_sharded_state_dict(theirs)
    assert back == mixed
    assert back["model"]["m.linear.weight"].data is root.linear.weight
    assert to_megatron_sharded_state_dict(theirs)["model"]["m.linear.weight"] is weight
    factory = megatron.ShardedTensorFactory("k")
    factory.build = lambda: {"part": [weight]}
    [built] = from_megatron_sharded_state_dict([factory])
    assert built == {"part": [entries["m.linear.weight"]]}
    weight.flattened_range = slice(0, 3)
    with pytest.raises(ValueError, match="flattened range slice"):
        from_megatron_sharded_state_dict(theirs)


def test_a_field_that_their_release_lacks_is_dropped_only_without_a_value(megatron):
    names = [one.name for one in dataclasses.fields(ShardedTensor)]
    theirs = dataclasses.make_dataclass("ShardedTensor", names[:-2])
    theirs.__module__ = megatron.__name__
    megatron.ShardedTensor = theirs
    entry = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    converted = to_megatron_sharded_state_dict([entry])
    assert type(converted[0]) is theirs
    assert from_megatron_sharded_state_dict(converted) == [entry]
    entry.allow_shape_mismatch = True
    with pytest.raises(ValueError, match="has no allow_shape_mismatch"):
        to_megatron_sharded_state_dict([entry])


def test_entries_for_a_megatron_that_is_missing_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing.mapping", None)
    with pytest.raises(RuntimeError, match="pip install megatron-core"):
        to_megatron_sharded_state_dict(ShardedObject("o", 1, (1,), (0,)))


@pytest.mark.parametrize("has_children", [False, True])
def test_a_plain_module_without_its_transient_buffers(has_children):
    plain = torch.nn.Module()
    plain.register_buffer("kept", torch.ones(1))
    plain.register_buffer("scratch", torch.ones(1), persistent=False)
    if has_children:
        plain.inner = MegatronModule(None)
    model = MegatronModule(None)
    model.plain = plain
    assert list(model.sharded_state_dict()) == list(model.state_dict()) == ["plain.kept"]
