import copy
import dataclasses
import functools
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcore.modules import LinearForLastLayer, MegatronModule
from mcore.parallel.process_groups import ProcessGroups, use_process_groups
from rank_testing import run_ranks


def filled(value):
    return lambda tensor: tensor.fill_(value)


@pytest.mark.usefixtures("on_each_device")
def test_documented_call_and_defaults():
    head = LinearForLastLayer(3, 2, False)
    logits, bias = head(torch.ones(4, 3))
    assert logits.shape == (4, 2)
    assert logits.dtype is torch.float32
    assert bias is None
    assert head.bias is None
    assert isinstance(head, torch.nn.Linear)
    assert head.tensor_model_parallel is False
    assert not hasattr(head.weight, "sequence_parallel")
    assert LinearForLastLayer(2, 1, False).weight.shape == (1, 2)


@pytest.mark.usefixtures("on_each_device")
def test_hand_computed_output_and_ignored_arguments():
    head = LinearForLastLayer(2, 3, False, init_method=filled(2.0))
    logits, _ = head(torch.ones(5, 1, 2), weight=torch.zeros(3, 2), runtime_gather_output=True)
    assert logits.tolist() == torch.full((5, 1, 3), 4.0).tolist()


@pytest.mark.usefixtures("on_each_device")
def test_a_bias_is_added_and_not_returned():
    head = LinearForLastLayer(2, 1, False, True, init_method=filled(1.0))
    assert head.bias.tolist() == [0.0]
    with torch.no_grad():
        head.bias.fill_(5.0)
    logits, bias = head(torch.ones(1, 2))
    assert (logits.item(), bias) == (7.0, None)


@pytest.mark.usefixtures("on_each_device")
def test_results_are_those_of_linear():
    torch.manual_seed(0)
    head = LinearForLastLayer(4, 3, False, bias=True)
    x = torch.randn(2, 5, 4)
    assert torch.equal(head(x)[0], F.linear(x, head.weight, head.bias))
    assert head(torch.empty(0, 2, 4))[0].shape == (0, 2, 3)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_input_of_another_dtype_is_cast_to_that_of_the_weight(weight, given):
    head = LinearForLastLayer(4, 1, False, dtype=weight, init_method=filled(0.5))
    assert head(torch.ones(2, 4, dtype=given))[0].tolist() == [[2.0], [2.0]]
    assert head(torch.ones(2, 4, dtype=given))[0].dtype is torch.float32
    native = LinearForLastLayer(4, 1, False, dtype=weight, output_in_fp32=False)
    assert native(torch.ones(2, 4, dtype=given))[0].dtype is weight


@pytest.mark.usefixtures("on_each_device")
def test_dropout_in_training_only():
    head = LinearForLastLayer(1000, 1, False, dropout=0.5, init_method=filled(1.0))
    torch.manual_seed(0)
    expected = F.dropout(torch.ones(1, 1000), 0.5).sum()
    torch.manual_seed(0)
    assert head(torch.ones(1, 1000))[0].item() == expected.item()
    assert head.eval()(torch.ones(1, 1000))[0].item() == 1000.0


@pytest.mark.usefixtures("on_each_device")
def test_dropout_is_a_module_whose_probability_may_be_changed():
    head = LinearForLastLayer(1000, 1, False, dropout=0.5, init_method=filled(1.0))
    assert isinstance(head.dropout, torch.nn.Dropout)
    assert head.dropout.p == 0.5
    head.dropout.p = 0.0
    assert head(torch.ones(1, 1000))[0].item() == 1000.0
    assert set(head.state_dict()) == {"weight"}


@pytest.mark.parametrize("dropout", [-0.1, 1.5, float("nan"), "0.5", None])
def test_what_is_no_probability_is_refused_at_construction(dropout):
    with pytest.raises(ValueError, match="Pass a probability"):
        LinearForLastLayer(2, 1, False, dropout=dropout)


@pytest.mark.usefixtures("on_each_device")
def test_default_initialisation_is_that_of_linear_or_none():
    torch.manual_seed(0)
    ours = LinearForLastLayer(4, 3, False, bias=True)
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)
    assert torch.equal(ours.weight, linear.weight)
    assert torch.equal(ours.bias, linear.bias)
    state = torch.get_rng_state()
    LinearForLastLayer(4, 3, False, perform_initialization=False, init_method=filled(1 / 0.5))
    assert torch.equal(torch.get_rng_state(), state)


def marked(head):
    parameters = [parameter for parameter in (head.weight, head.bias) if parameter is not None]
    return all(getattr(parameter, "sequence_parallel", False) is True for parameter in parameters)


@contextmanager
def overwriting():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def overwritten(head):
    with overwriting():
        return head.double()


def assigned(head):
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    parent = torch.nn.ModuleDict({"head": head})
    parent.load_state_dict({f"head.{k}": v for k, v in state.items()}, assign=True)
    return parent["head"]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head,
        lambda head: head.half(),
        overwritten,
        assigned,
        copy.deepcopy,
        lambda head: pickle.loads(pickle.dumps(head)),
        lambda head: head.to("meta").to_empty(device="cpu"),
    ],
    ids=["built", "half", "overwritten", "assigned", "deepcopy", "pickle", "meta"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_sequence_parallel_mark_stays(change, bias):
    assert marked(change(LinearForLastLayer(2, 1, True, bias)))


def test_a_build_on_the_meta_device():
    with torch.device("meta"):
        head = LinearForLastLayer(2, 1, True, init_method=filled(0.125))
    head.to_empty(device="cpu")
    head.reset_parameters()
    assert head.weight.tolist() == [[0.125, 0.125]]
    assert marked(head)


@pytest.mark.usefixtures("on_each_device")
def test_sequence_parallel_in_one_process_gathers_nothing():
    head = LinearForLastLayer(2, 1, True, init_method=filled(1.0))
    assert head(torch.ones(3, 1, 2))[0].shape == (3, 1, 1)


WEIGHT = torch.tensor([[1.0, 2.0, 3.0]])
SCALE = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1)


def reference():
    x = torch.arange(12.0).reshape(4, 1, 3).requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    y = F.linear(x, weight)
    (y * SCALE).sum().backward()
    return y.flatten().tolist(), weight.grad, x.grad


def gather_and_train(how, dtype):
    group = dist.group.WORLD
    head = LinearForLastLayer(
        3, 1, True, tp_group=None if how == "default" else group, dtype=dtype, check_shapes=True
    )
    with torch.no_grad():
        head.weight.copy_(WEIGHT)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    x = torch.arange(12.0).reshape(4, 1, 3)[rows].clone().requires_grad_()
    default = ProcessGroups.from_sizes(tp=2) if how == "default" else None
    with use_process_groups(default):
        y, _ = head(x)
    (y * SCALE).sum().backward()
    weight_grad = head.weight.grad.clone()
    dist.all_reduce(weight_grad)
    return y.flatten().tolist(), weight_grad, x.grad


def forward_without_a_group():
    head = LinearForLastLayer(3, 1, True)
    try:
        head(torch.ones(2, 1, 3))
    except ValueError as error:
        return str(error)
    return None


def gather_unequal_lengths():
    head = LinearForLastLayer(3, 1, True, tp_group=dist.group.WORLD, check_shapes=True)
    try:
        head(torch.ones(2 + dist.get_rank(), 1, 3))
    except ValueError as error:
        return str(error)
    return None


def gather_nothing():
    head = LinearForLastLayer(3, 1, False, tp_group=dist.group.WORLD)
    if dist.get_rank() == 0:
        # A collective would wait for the other rank.
        return tuple(head(torch.empty(4, 1, 3))[0].shape)
    return None


def gather_empty():
    head = LinearForLastLayer(3, 1, True, tp_group=dist.group.WORLD)
    return tuple(head(torch.empty(0, 1, 3))[0].shape)


@dataclasses.dataclass
class Collection:
    tp: object


class Slotted:
    __slots__ = ("group",)


class OneSlotMore(Slotted):
    __slots__ = "other"


def copy_with_group():
    group = dist.group.WORLD
    model = MegatronModule(SimpleNamespace(groups={"tp": [group]}))
    model.head = LinearForLastLayer(3, 1, True, tp_group=group)
    plain = model.plain = torch.nn.Identity()
    plain.group = group
    plain.collection = Collection(group)
    plain.slotted = OneSlotMore()
    # Groups that nothing else holds.
    plain.slotted.group, plain.slotted.other = dist.new_group(), dist.new_group()
    of_partial = dist.new_group()
    plain.reduce = functools.partial(dist.all_reduce, group=of_partial)
    plain.mesh = SimpleNamespace(mesh=init_device_mesh("cpu", (1,)))
    copied = copy.deepcopy(model)
    alone = copy.deepcopy(model.head)
    found = copied.plain
    held = [copied.head.tp_group, alone.tp_group, copied.config.groups["tp"][0], found.group]
    held.append(found.collection.tp)
    shared = all(one is group for one in held) and found.mesh.mesh is plain.mesh.mesh
    shared &= found.slotted.group is plain.slotted.group
    shared &= found.slotted.other is plain.slotted.other
    shared &= found.reduce.keywords["group"] is of_partial
    separate = found.collection is not plain.collection and copied.config is not model.config
    return (
        shared and separate,
        marked(copied.head) and marked(alone),
        alone.weight is model.head.weight,
    )


def test_copies_of_models_share_process_groups_and_meshes_at_any_depth():
    assert run_ranks(copy_with_group, 1) == [(True, True, False)]


def shard_and_train():
    torch.manual_seed(0)
    head = LinearForLastLayer(4, 2, True, bias=True, tp_group=None)
    model = MegatronModule(None)
    model.head = head
    marks = []
    for whole in (head, model):
        fully_shard(whole)
        marks.append(marked(head))
    head.tp_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    logits, _ = head(torch.ones(2, 1, 4))
    marks.append(marked(head))
    logits.sum().backward()
    return [*marks, marked(head)]


DTYPES = (torch.float16, torch.bfloat16)


def all_forwards():
    found = {
        "argument": gather_and_train("argument", torch.float32),
        "default": gather_and_train("default", torch.float32),
        "16 bits": [gather_and_train("argument", dtype)[0] for dtype in DTYPES],
        "no group": forward_without_a_group(),
        "unequal": gather_unequal_lengths(),
        "empty": gather_empty(),
        "marks": shard_and_train(),
    }
    # Last: a collective of one rank would wait, not meet the next.
    return {**found, "nothing": gather_nothing()}


@pytest.fixture(scope="module")
def two_ranks():
    """What heads did on each of two ranks."""
    return run_ranks(all_forwards, 2)


@pytest.mark.parametrize("how", ["argument", "default"])
def test_outputs_and_gradients_of_two_ranks_are_those_of_one_process(how, two_ranks):
    outputs, weight_grad, input_grad = reference()
    assert outputs == [8.0, 26.0, 44.0, 62.0]
    assert weight_grad.tolist() == [[9630.0, 10741.0, 11852.0]]
    for rank, found in enumerate(two_ranks):
        assert found[how][0] == outputs
        assert torch.equal(found[how][1], weight_grad)
        assert torch.equal(found[how][2], input_grad[2 * rank : 2 * rank + 2])


def test_sixteen_bit_heads_and_empty_slices_are_gathered_too(two_ranks):
    for found in two_ranks:
        assert found["16 bits"] == [[8.0, 26.0, 44.0, 62.0]] * 2
        assert found["empty"] == (0, 1, 1)


def test_a_missing_group_and_unequal_lengths_are_refused_on_all_ranks(two_ranks):
    for rank, found in enumerate(two_ranks):
        assert "tp_group" in found["no group"]
        assert f"length {2 + rank}" in found["unequal"]
        assert "the group are 2 to 3" in found["unequal"]


def test_without_sequence_parallelism_there_is_no_collective(two_ranks):
    assert [found["nothing"] for found in two_ranks] == [(4, 1, 1), None]


def test_the_mark_stays_through_fully_shard_and_training(two_ranks):
    assert [found["marks"] for found in two_ranks] == [[True] * 4] * 2


def test_parameters_of_a_weight_norm_are_marked():
    head = LinearForLastLayer(2, 1, True, bias=True)
    torch.nn.utils.parametrizations.weight_norm(head)
    head(torch.ones(2, 1, 2))
    marks = {name: param.sequence_parallel for name, param in head.named_parameters()}
    assert marks == dict.fromkeys(
        ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"], True
    )
