import copy
import dataclasses
import pickle
from collections import namedtuple
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.modules import (
    ConfigFieldError,
    Float16Module,
    MegatronModule,
    TransformerConfig,
    keep_in_fp32,
    mark_keep_in_fp32,
)
from rank_testing import run_ranks

FP16 = SimpleNamespace(fp16=True)
BF16 = SimpleNamespace(bf16=True)
Out = namedtuple("Out", ["logits", "ids"])


@dataclasses.dataclass
class OutClass:
    logits: torch.Tensor


class Recorder(MegatronModule):
    """Linear(2, 1) that records what it is called with."""

    def __init__(self, make_output=lambda logits: logits):
        super().__init__(None)
        self.linear = torch.nn.Linear(2, 1)
        self.make_output = make_output

    def forward(self, x, **kwargs):
        self.seen = {"x": x, **kwargs}
        return self.make_output(self.linear(x.to(self.linear.weight.dtype)))


class Marked(torch.nn.Module):
    """One parameter and one buffer marked on the tensors, one parameter by name."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.router = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("counts", torch.zeros(2))
        mark_keep_in_fp32(self.router)
        mark_keep_in_fp32(self.counts)
        keep_in_fp32(self.linear, "bias")


KEPT = {"router", "counts", "linear.bias"}


def kept_names(module):
    state = module.state_dict(keep_vars=True)
    marked = {name for name, tensor in state.items() if getattr(tensor, "keep_in_fp32", False)}
    single = {name for name, tensor in state.items() if tensor.dtype is torch.float32}
    assert marked == single
    return marked


@pytest.mark.parametrize(("config", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_runs_in_16_bits_and_gives_float32(config, dtype):
    model = Float16Module(config, torch.nn.Linear(2, 1))
    assert model.module.weight.dtype is dtype
    assert model(torch.ones(2, 2)).dtype is torch.float32
    assert model(torch.ones(2, 2), fp32_output=False).dtype is dtype


def test_attributes():
    inner = Recorder()
    config = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, bf16=True)
    model = Float16Module(config, inner)
    assert (model.config, model.fp16, model.bf16) == (config, False, True)
    assert (model.vp_size, model.vp_stage, model.pg_collection) == (None, None, None)
    assert model.module is inner
    assert model.float16_convertor(torch.ones(1)).dtype is torch.bfloat16
    assert dict(model.named_children()) == {"module": inner}


def test_results_are_those_of_the_module_run_in_16_bits():
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    model = Float16Module(BF16, copy.deepcopy(plain))
    x = torch.randn(5, 4)
    assert torch.equal(model(x), plain.bfloat16()(x.bfloat16()).float())


def test_positional_and_keyword_inputs_are_cast_and_others_arrive_unchanged():
    model = Float16Module(BF16, Recorder())
    ids, mask = torch.arange(3), torch.tensor([True])
    loss_mask = torch.ones(3)
    model(x=torch.ones(2, 2), ids=ids, mask=mask, loss_mask=loss_mask, scale=2.0)
    seen = model.module.seen
    assert seen["x"].dtype is torch.bfloat16
    assert seen["ids"] is ids
    assert seen["mask"] is mask
    assert seen["loss_mask"] is loss_mask
    assert seen["scale"] == 2.0
    model(torch.ones(2, 2))
    assert model.module.seen["x"].dtype is torch.bfloat16


def test_no_cast_kwargs_can_be_chosen():
    model = Float16Module(BF16, Recorder(), no_cast_kwargs=["times"])
    model(torch.ones(2, 2), times=torch.ones(1), loss_mask=torch.ones(1))
    assert model.module.seen["times"].dtype is torch.float32
    assert model.module.seen["loss_mask"].dtype is torch.bfloat16
    with pytest.raises(TypeError, match="loss_mask"):
        Float16Module(BF16, Recorder(), no_cast_kwargs="loss_mask")


def test_one_tensor_given_twice_arrives_as_one_tensor():
    model = Float16Module(BF16, Recorder())
    x = torch.ones(2, 2)
    model(x, again=[x])
    assert model.module.seen["again"][0] is model.module.seen["x"]


def test_outputs_are_upcast_with_their_types():
    ids = torch.arange(2)
    for make in (lambda y: Out(y, ids), lambda y: {"logits": y}, OutClass):
        model = Float16Module(BF16, Recorder(make))
        out = model(torch.ones(2, 2))
        logits = out["logits"] if isinstance(out, dict) else out.logits
        assert type(out) is type(make(None))
        assert logits.dtype is torch.float32
    assert Float16Module(BF16, Recorder(lambda y: Out(y, ids)))(torch.ones(2, 2)).ids is ids


@pytest.mark.parametrize("truthy", [True, 1, torch.tensor(True)])
def test_fp32_output_is_a_truth_value(truthy):
    assert Float16Module(BF16, Recorder())(torch.ones(1, 2), fp32_output=truthy).dtype is (
        torch.float32
    )


def test_gradient_reaches_a_float32_input():
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.dtype is torch.float32
    assert torch.equal(x.grad, model.module.weight.detach().float())
    assert model.module.weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(fp16=True, bf16=True),
        SimpleNamespace(fp16=False, bf16=False),
        SimpleNamespace(bf16=None, fp16=False),
    ],
)
def test_exactly_one_precision_is_needed(config):
    with pytest.raises(ValueError, match=r"fp16=.*bf16="):
        Float16Module(config, torch.nn.Linear(1, 1))


def test_a_config_without_precision_is_refused():
    with pytest.raises(ConfigFieldError, match=r"fp16.*bf16"):
        Float16Module(SimpleNamespace(), torch.nn.Linear(1, 1))


def test_only_modules_are_wrapped():
    with pytest.raises(TypeError, match="function"):
        Float16Module(BF16, lambda x: x)


def test_ties_and_identity_are_kept():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    weight = module[0].weight
    model = Float16Module(BF16, module)
    assert model.module[0].weight is weight is model.module[1].weight


# Stages


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


def copy_with_groups():
    model = Float16Module(BF16, Recorder(), pg_collection=SimpleNamespace(pp=None))
    model.module.tp_group = dist.group.WORLD
    copied = copy.deepcopy(model)
    return copied.module.tp_group is dist.group.WORLD and copied.module is not model.module


def test_copies_share_process_groups():
    assert run_ranks(copy_with_groups, 1) == [True]


# Tensors kept in float32


@contextmanager
def future_flag(name):
    setter = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
    setter(True)
    try:
        yield
    finally:
        setter(False)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.to(torch.float16),
        lambda model: torch.nn.Sequential(model).half()[0],
        copy.deepcopy,
        lambda model: copy.deepcopy(copy.deepcopy(model)).half(),
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["built", "half", "bfloat16", "to", "parent", "deepcopy", "twice", "pickle"],
)
def test_marked_tensors_stay_in_float32(change):
    model = change(Float16Module(BF16, Marked()))
    assert kept_names(model) == KEPT
    assert model.module.linear.weight.dtype in {torch.float16, torch.bfloat16}


@pytest.mark.parametrize("flag", ["overwrite", "swap"])
@pytest.mark.parametrize("change", ["half", "deepcopy"])
def test_marks_survive_conversions_that_replace_parameters(flag, change):
    with future_flag(flag):
        model = Float16Module(BF16, Marked())
        model = model.half() if change == "half" else copy.deepcopy(model)
        assert kept_names(model) == KEPT


def test_marks_survive_a_build_on_the_meta_device():
    with torch.device("meta"):
        model = Float16Module(BF16, Marked())
    model.to_empty(device="cpu")
    assert kept_names(model) == KEPT
    assert not model.module.router.is_meta


def test_all_tensors_follow_the_device():
    model = Float16Module(BF16, Marked()).to("meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert kept_names(model) == KEPT


def test_gradients_of_marked_parameters_keep_their_dtype():
    model = Float16Module(BF16, Marked())
    model.module.router.sum().backward()
    model.half()
    assert model.module.router.grad.dtype is torch.float32


def test_float8_buffers_are_left_alone_later_too():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("small", torch.ones(1).to(torch.float8_e4m3fn))
    model = Float16Module(BF16, module).half()
    assert model.module.small.dtype is torch.float8_e4m3fn


def test_a_mark_made_after_wrapping_becomes_lasting_with_the_next_conversion():
    model = Float16Module(BF16, torch.nn.Linear(1, 1)).float()
    mark_keep_in_fp32(model.module.bias)
    model.half()
    assert kept_names(copy.deepcopy(model)) == {"bias"}


@pytest.mark.parametrize("through", ["wrapper", "parent"])
def test_assigned_tensors_get_precision_and_marks(through):
    model = Float16Module(BF16, Marked())
    state = {name: torch.ones_like(t).half() for name, t in Marked().state_dict().items()}
    if through == "wrapper":
        model.load_state_dict(state, assign=True)
    else:
        parent = torch.nn.Module()
        parent.child = model
        parent.load_state_dict({f"child.{k}": v for k, v in state.items()}, assign=True)
    assert kept_names(model) == KEPT
    assert model.module.linear.weight.dtype is torch.bfloat16
    assert model.module.router.tolist() == [1.0, 1.0]


def test_loading_without_assign_leaves_a_later_cast_alone():
    parent = torch.nn.Module()
    parent.child = Float16Module(BF16, torch.nn.Linear(1, 1))
    parent.float()
    parent.load_state_dict(parent.state_dict())
    assert parent.child.module.weight.dtype is torch.float32


# State dicts


def batch_norm():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def test_keys_are_those_of_the_wrapped_module():
    module = batch_norm()
    model = Float16Module(BF16, module)
    assert model.state_dict().keys() == module.state_dict().keys()
    assert model.state_dict()._metadata == module.state_dict()._metadata
    assert list(model.state_dict(prefix="p.")) == [f"p.{key}" for key in module.state_dict()]
    weight = model.state_dict(keep_vars=True)["0.weight"]
    assert weight is module[0].weight
    destination = {"other": 1}
    assert model.state_dict(destination, "p.") is destination
    assert len(destination) == 1 + len(module.state_dict())


def test_save_checkpoint_is_delegated():
    class Saves(Recorder):
        def state_dict_for_save_checkpoint(self, prefix="", keep_vars=False):
            return {f"{prefix}own": keep_vars}

    model = Float16Module(BF16, Saves())
    assert model.state_dict_for_save_checkpoint("p.", True) == {"p.own": True}
    plain = Float16Module(BF16, torch.nn.Linear(1, 1))
    assert set(plain.state_dict_for_save_checkpoint("p.")) == {"p.weight", "p.bias"}


def test_set_input_tensor_is_delegated():
    class Takes(Recorder):
        def set_input_tensor(self, tensor):
            return ("taken", tensor)

    assert Float16Module(BF16, Takes()).set_input_tensor(3) == ("taken", 3)


@pytest.mark.parametrize("spelling", ["", "module."])
def test_load_returns_missing_and_unexpected_keys(spelling):
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    state = {f"{spelling}weight": torch.full((1, 2), 3.0), f"{spelling}other": torch.ones(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["bias"]
    assert result.unexpected_keys == ["other"]
    assert model.module.weight.tolist() == [[3.0, 3.0]]
    with pytest.raises(RuntimeError, match="bias"):
        model.load_state_dict(state)


class Owner(torch.nn.Module):
    """Owns a child called ``module``, as a wrapper does."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), batch_norm, Owner])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spelling", ["own", "registered"])
def test_round_trip_inside_a_parent(make, depth, spelling):
    def parent():
        module = make()
        for _ in range(depth):
            module = Float16Module(BF16, module)
        return torch.nn.ModuleDict({"child": module, "other": torch.nn.Linear(1, 1)})

    source, target = parent(), parent()
    state = source.state_dict()
    if spelling == "registered":
        wrappers = "module." * depth
        state = {
            key.replace("child.", f"child.{wrappers}", 1): value for key, value in state.items()
        }
    result = target.load_state_dict(state)
    assert result == ([], [])
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


def test_versions_of_modules_reach_them_through_a_parent():
    seen = []

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    parent = torch.nn.ModuleDict({"child": Float16Module(BF16, Versioned(1, 1))})
    parent.load_state_dict(parent.state_dict())
    assert seen == [7]


def test_copies_in_a_parent_load_into_themselves():
    parent = torch.nn.ModuleDict({"child": Float16Module(BF16, torch.nn.Linear(1, 1))})
    copied = copy.deepcopy(parent)
    copied.load_state_dict({"child.weight": torch.full((1, 1), 5.0), "child.bias": torch.ones(1)})
    assert copied.child.module.weight.item() == 5.0
    assert parent.child.module.weight.item() != 5.0


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), batch_norm, Owner])
@pytest.mark.parametrize("place", [lambda m: m, lambda m: torch.nn.ModuleDict({"child": m})])
def test_distributed_checkpoint_sees_the_keys_of_the_wrapped_module(make, place):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        set_model_state_dict,
    )

    model, other = (place(Float16Module(BF16, make())) for _ in range(2))
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(other, state)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_sharded_keys_are_those_of_the_wrapped_module():
    plain = Float16Module(BF16, torch.nn.Linear(2, 1))
    entries = plain.sharded_state_dict("m.", ((0, 1, 4),))
    assert set(entries) == {"m.weight", "m.bias"}
    assert entries["m.weight"].data is plain.module.weight
    assert entries["m.weight"].global_shape == (4, 1, 2)
    own = Float16Module(BF16, Recorder())
    assert set(own.sharded_state_dict(prefix="m.", metadata={"a": 1})) == {
        "m.linear.weight",
        "m.linear.bias",
    }


def test_forward_compiles_without_graph_breaks():
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(3, 2)
    assert torch.equal(compiled(x), model(x))
