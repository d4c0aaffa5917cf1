import __future__

import copy
import dataclasses
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.modules import (
    ConfigFieldError,
    Float16Module,
    MegatronModule,
    TransformerConfig,
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


def test_arguments_are_found_beside_annotations_that_only_type_checkers_know():
    """From Python 3.14 on without an import from ``__future__``, before it with one."""
    source = "def forward(self, x: Tensor, times: Times): return times"
    flags = 0 if sys.version_info >= (3, 14) else __future__.annotations.compiler_flag
    names = {}
    exec(compile(source, "user", "exec", flags, dont_inherit=True), names)
    model = type("Model", (torch.nn.Module,), {"forward": names["forward"]})()
    model = Float16Module(BF16, model, no_cast_kwargs=["times"])
    times = torch.ones(1)
    assert model(torch.ones(2), times, fp32_output=False) is times


def test_arguments_may_be_kept_in_float32_later_by_name_and_by_position():
    class Policy(MegatronModule):
        def __init__(self):
            super().__init__(None)
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, x, advantages, *, returns=None):
            self.seen = [x.dtype, advantages.dtype, None if returns is None else returns.dtype]
            return self.linear(x)

    model = Float16Module(BF16, Policy())
    model.keep_arguments_in_fp32("advantages", "returns")
    for copied in (model, copy.deepcopy(model)):
        for args, kwargs in (
            ((torch.ones(1, 2), torch.ones(1)), {"returns": torch.ones(1)}),
            ((torch.ones(1, 2),), {"advantages": torch.ones(1), "returns": torch.ones(1)}),
        ):
            copied(*args, **kwargs)
            assert copied.module.seen == [torch.bfloat16, torch.float32, torch.float32]
    assert model.no_cast_kwargs == {"loss_mask", "advantages", "returns"}
    with pytest.raises(TypeError, match="a name is a int"):
        model.keep_arguments_in_fp32(1)


def test_what_the_module_fills_is_filled_for_the_caller():
    class Fills(Recorder):
        def forward(self, x, *, cache, context):
            cache.append(x.dtype)
            context.state["step"] = 1
            return super().forward(x)

    cache, context = [], SimpleNamespace(state={})
    Float16Module(BF16, Fills())(torch.ones(1, 2), cache=cache, context=context)
    assert cache == [torch.bfloat16]
    assert context.state == {"step": 1}


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


def test_set_input_tensor_is_delegated():
    class Takes(Recorder):
        def set_input_tensor(self, tensor):
            return ("taken", tensor)

    assert Float16Module(BF16, Takes()).set_input_tensor(3) == ("taken", 3)


def test_forward_compiles_without_graph_breaks():
    model = Float16Module(BF16, torch.nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(3, 2)
    assert torch.equal(compiled(x), model(x))


def copy_with_groups():
    model = Float16Module(BF16, Recorder(), pg_collection=SimpleNamespace(pp=None))
    model.module.tp_group = dist.group.WORLD
    copied = copy.deepcopy(model)
    return copied.module.tp_group is dist.group.WORLD and copied.module is not model.module


def test_copies_share_process_groups():
    assert run_ranks(copy_with_groups, 1) == [True]
