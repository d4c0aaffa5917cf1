import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import calc_dtensor_params_l2_norm, calc_params_l2_norm
from mcore.parallel.process_groups import ProcessGroups
from rank_testing import run_ranks

FP32 = SimpleNamespace(bf16=False, fp16=False)
BF16 = SimpleNamespace(bf16=True, fp16=False)
FP16 = SimpleNamespace(bf16=False, fp16=True)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ones_layer():
    layer = torch.nn.Linear(10, 20, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def module_of(**parameters):
    module = torch.nn.Module()
    for name, value in parameters.items():
        setattr(module, name, torch.nn.Parameter(value))
    return module


@pytest.mark.usefixtures("on_each_device")
def test_plain_modules():
    assert calc_params_l2_norm(ones_layer(), FP32) == pytest.approx(math.sqrt(200))
    assert calc_params_l2_norm([ones_layer(), ones_layer()], FP32) == pytest.approx(20.0)
    assert calc_params_l2_norm(torch.nn.Identity(), FP32) == 0.0
    assert calc_params_l2_norm([], None) == 0.0


@pytest.mark.usefixtures("on_each_device")
def test_agrees_with_plain_torch():
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 1, 1, 32)
    expected = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]).item()
    assert calc_params_l2_norm(model, FP32) == pytest.approx(expected, rel=1e-5)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(-100, 100), max_size=20), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=12,
    )
)
def test_mixed_types_and_sizes(specification):
    values = {f"p{i}": torch.tensor(v, dtype=t) for i, (v, t) in enumerate(specification)}
    squares = sum(value * value for values, _ in specification for value in values)
    assert calc_params_l2_norm(module_of(**values), FP32) == pytest.approx(
        math.sqrt(squares), rel=1e-5
    )


@pytest.mark.usefixtures("on_each_device")
def test_the_same_parameter_twice_counts_twice():
    chunk = module_of(weight=torch.tensor([3.0]))
    assert calc_params_l2_norm([chunk, chunk], FP32) == pytest.approx(math.sqrt(18.0))


@pytest.mark.usefixtures("on_each_device")
def test_half_parameters_are_summed_in_fp32():
    module = module_of(weight=torch.full((100_000,), 300.0, dtype=torch.float16))
    assert calc_params_l2_norm(module, FP16) == pytest.approx(300 * math.sqrt(100_000), rel=1e-4)


@pytest.mark.usefixtures("on_each_device")
def test_other_types_count_too():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor([3, 4], dtype=torch.int8), requires_grad=False)
    module.phase = torch.nn.Parameter(torch.tensor([12j]))
    assert calc_params_l2_norm(module, FP32) == pytest.approx(13.0)


@pytest.mark.usefixtures("on_each_device")
def test_shared_parameters_count_not_at_all_also_those_of_experts():
    module = module_of(owned=torch.tensor([5.0]), copy=torch.tensor([9.0]), expert=torch.ones(4))
    module.copy.shared = True
    module.expert.shared = True
    module.expert.allreduce = False
    assert calc_params_l2_norm(module, FP32) == pytest.approx(5.0)


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("config", [BF16, FP16])
def test_main_parameters_count_in_half_precision(config):
    module = module_of(weight=torch.full((4,), 2.0, dtype=torch.bfloat16))
    module.weight.main_param = torch.tensor([3.0, 4.0])
    assert calc_params_l2_norm(module, config) == pytest.approx(5.0)
    assert calc_params_l2_norm(module, FP32) == pytest.approx(4.0)
    assert calc_params_l2_norm(module, config, force_create_fp32_copy=True) == pytest.approx(4.0)


@pytest.mark.usefixtures("on_each_device")
def test_a_missing_main_parameter():
    module = module_of(weight=torch.full((4,), 2.0, dtype=torch.bfloat16))
    module.weight.main_param = None
    assert calc_params_l2_norm(module, BF16) == pytest.approx(4.0)
    module.weight.main_param_sharded = True  # another rank holds all of it
    assert calc_params_l2_norm(module, BF16) == 0.0


def counted(calls):
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(k.get("group")), all_reduce(*a, **k))[1]


def one_rank():
    calls = []
    counted(calls)
    norm = calc_params_l2_norm(ones_layer(), FP32, pg_collection=ProcessGroups.from_sizes())
    return norm, len(calls)


def test_one_rank_takes_no_collective():
    assert run_ranks(one_rank, 1) == [(pytest.approx(math.sqrt(200)), 0)]


def tensor_parallel():
    module = module_of(split=torch.ones(4), whole=torch.ones(1))
    module.split.tensor_model_parallel = True
    groups = ProcessGroups.from_sizes(tp=2)
    calls = []
    counted(calls)
    explicit = calc_params_l2_norm(module, FP32, pg_collection=groups)
    module.pg_collection = groups
    return explicit, calc_params_l2_norm([module], FP32), len(calls)


def test_whole_parameters_count_once_over_tensor_parallel_ranks():
    for explicit, of_model, calls in run_ranks(tensor_parallel, 2):
        assert explicit == of_model == pytest.approx(3.0)
        assert calls == 2  # one each: dense and experts have the same ranks


def sharded_main_parameters():
    rank = dist.get_rank()
    module = module_of(
        dense=torch.zeros(2, dtype=torch.bfloat16), expert=torch.zeros(2, dtype=torch.bfloat16)
    )
    module.expert.allreduce = False
    squares = {"dense": (4.0, 12.0), "expert": (9.0, 16.0)}
    for name, shares in squares.items():
        parameter = getattr(module, name)
        parameter.main_param_sharded = True
        parameter.main_param = torch.tensor([math.sqrt(shares[rank])])
    if rank == 1:
        module.elsewhere = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        module.elsewhere.main_param_sharded = True
        module.elsewhere.main_param = None
    calls = []
    counted(calls)
    groups = SimpleNamespace(dp_cp=dist.group.WORLD, expt_dp=dist.group.WORLD)
    return calc_params_l2_norm(module, BF16, pg_collection=groups), len(calls)


def test_sharded_main_parameters_are_summed_with_one_call():
    # squares: dense 4 + 12, experts 9 + 16
    assert run_ranks(sharded_main_parameters, 2) == [(pytest.approx(math.sqrt(41)), 1)] * 2


def only_rank_0_has_experts():
    module = module_of(dense=torch.tensor([3.0]))
    module.dense.tensor_model_parallel = True
    if dist.get_rank() == 0:
        module.expert = torch.nn.Parameter(torch.tensor([math.sqrt(7.0)]))
        module.expert.allreduce = False
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = SimpleNamespace(mp=alone, tp_ep_pp=dist.group.WORLD)
    return calc_params_l2_norm(module, FP32, pg_collection=groups)


def test_ranks_without_experts_take_part():
    assert run_ranks(only_rank_0_has_experts, 2) == [pytest.approx(4.0)] * 2


def dtensors_beside_plain_parameters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    module = module_of(plain=torch.tensor([4.0]))
    module.split = torch.nn.Parameter(distribute_tensor(torch.ones(9), mesh, [Shard(0)]))
    dense = calc_params_l2_norm(module, FP32, pg_collection=SimpleNamespace(dp_cp=dist.group.WORLD))
    half = module_of()
    half.split = torch.nn.Parameter(
        distribute_tensor(torch.zeros(4, dtype=torch.bfloat16), mesh, [Shard(0)])
    )
    half.split.main_param = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    return dense, calc_params_l2_norm(half, BF16)


def test_plain_parameters_beside_dtensors_count_once():
    assert run_ranks(dtensors_beside_plain_parameters, 2) == [(5.0, 2.0)] * 2


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    stopped = []
    module = torch.nn.Module()
    module.stop_communication = lambda: stopped.append(1)
    module.split = torch.nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Shard(0)]))
    norm = calc_params_l2_norm([module, module_of()], BF16, use_megatron_fsdp=True)
    module.plain = torch.nn.Parameter(torch.ones(1))
    try:
        calc_params_l2_norm(module, BF16, use_megatron_fsdp=True)
    except RuntimeError as error:
        return norm, len(stopped), str(error)


def test_megatron_fsdp():
    for norm, stopped, error in run_ranks(fsdp, 2):
        assert norm == 4.0
        assert stopped == 2
        assert error.startswith("plain is a Parameter, not a DTensor")


def dtensor_norms():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    ones = torch.ones(16)

    def norm(*placements, mesh=flat, value=ones):
        return calc_dtensor_params_l2_norm([distribute_tensor(value, mesh, list(placements))])

    calls = []
    counted(calls)
    many = [distribute_tensor(ones, flat, [Shard(0)]) for _ in range(4)]
    together = calc_dtensor_params_l2_norm(many)
    count = len(calls)
    try:
        calc_dtensor_params_l2_norm([DTensor.from_local(ones, flat, [Partial()])])
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    return (
        {
            "shard": norm(Shard(0)),
            "replicate": norm(Replicate()),
            "mixed": norm(Replicate(), Shard(0), mesh=square),
            "both": norm(Shard(0), Shard(0), mesh=square),
            "both dims": norm(Shard(1), Shard(0), mesh=square, value=ones.view(4, 4)),
            "empty shards": norm(Shard(0), value=torch.ones(1)),
            "together": together,
        },
        count,
        error,
    )


def test_dtensors_of_four_ranks():
    for norms, count, error in run_ranks(dtensor_norms, 4):
        assert norms == {
            "shard": 4.0,
            "replicate": 4.0,
            "mixed": 4.0,
            "both": 4.0,
            "both dims": 4.0,
            "empty shards": 1.0,
            "together": 8.0,
        }
        assert count == 1
        assert "redistribute it first" in error


@pytest.mark.usefixtures("on_each_device")
def test_what_is_no_dtensor_is_named():
    assert calc_dtensor_params_l2_norm([]) == 0.0
    with pytest.raises(RuntimeError, match="parameter 0 is a Tensor, not a DTensor"):
        calc_dtensor_params_l2_norm([torch.ones(2)])


def gathered_late(parameter):
    parameter._ensure_param_ready_callback = lambda: parameter.data.fill_(2)
    return parameter


@pytest.mark.parametrize("force_create_fp32_copy", [False, True])
def test_parameters_that_are_gathered_late_count_with_their_values(force_create_fp32_copy):
    layer = ones_layer()
    gathered_late(layer.weight)
    norm = calc_params_l2_norm(layer, FP32, force_create_fp32_copy=force_create_fp32_copy)
    assert norm == pytest.approx(2 * math.sqrt(200))


def norm_of_a_late_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return calc_dtensor_params_l2_norm(
        [gathered_late(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))]
    )


def test_dtensors_that_are_gathered_late_count_with_their_values():
    assert run_ranks(norm_of_a_late_dtensor, 1) == [4.0]
