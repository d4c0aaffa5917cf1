import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import report_l2_norm_grad
from rank_testing import run_ranks

P = "l2_norm/grad/"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def chunk_of(**gradients):
    module = torch.nn.Module()
    for name, gradient in gradients.items():
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        setattr(module, name, parameter)
    return module


def scalar(value):
    return torch.tensor([float(value)])


def test_two_chunks():
    assert report_l2_norm_grad([chunk_of(a=scalar(3)), chunk_of(b=scalar(4))]) == {
        f"{P}a": 3.0,
        f"{P}b": 4.0,
        f"{P}global": 5.0,
    }


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(-100, 100), max_size=20), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=12,
    )
)
def test_mixed_types_and_sizes_in_any_order(specification):
    gradients = [torch.tensor(values, dtype=dtype) for values, dtype in specification]
    report = report_l2_norm_grad(chunk_of(**{f"p{i}": g for i, g in enumerate(gradients)}))
    squares = [sum(value * value for value in values) for values, _ in specification]
    norms = [report[f"{P}p{i}"] for i in range(len(gradients))]
    assert norms == pytest.approx([math.sqrt(square) for square in squares], rel=1e-5)
    assert report[f"{P}global"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


def test_the_same_gradient_twice_counts_twice():
    chunk = chunk_of(a=scalar(3))
    assert report_l2_norm_grad([chunk, chunk]) == {
        f"{P}a": 3.0,
        f"{P}chunk1.a": 3.0,
        f"{P}global": pytest.approx(math.sqrt(18.0)),
    }


def test_ten_chunks_count_once_each():
    report = report_l2_norm_grad([chunk_of(**{f"layer_{i}": scalar(i)}) for i in range(10)])
    assert report[f"{P}global"] == pytest.approx(16.881943, abs=1e-6)
    assert report[f"{P}layer_9"] == 9.0
    assert len(report) == 11


def test_names_that_clash_are_told_apart():
    chunks = [chunk_of(a=scalar(3)), chunk_of(a=scalar(4)), chunk_of(a=scalar(12), b=scalar(0))]
    assert report_l2_norm_grad(chunks) == {
        f"{P}a": 3.0,
        f"{P}chunk1.a": 4.0,
        f"{P}chunk2.a": 12.0,
        f"{P}b": 0.0,
        f"{P}global": 13.0,
    }


def test_main_grad_comes_first_and_what_has_no_gradient_is_left_out():
    module = chunk_of(main=scalar(100), none=scalar(100), frozen=scalar(100))
    module.main.main_grad = scalar(3)
    module.none.main_grad = None
    module.none.grad = scalar(4)
    module.frozen.requires_grad_(False)
    module.unused = torch.nn.Parameter(torch.ones(2))
    assert report_l2_norm_grad(module) == {f"{P}main": 3.0, f"{P}none": 4.0, f"{P}global": 5.0}


def test_nothing_to_report():
    for model in (torch.nn.Linear(1, 1), [], [torch.nn.Identity()]):
        assert report_l2_norm_grad(model) == {f"{P}global": 0.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_gradients_do_not_overflow(dtype):
    report = report_l2_norm_grad(chunk_of(a=torch.full((10_000,), 3e4, dtype=dtype)))
    assert report[f"{P}a"] == pytest.approx(3e4 * 100, rel=5e-3)


def test_a_gradient_that_is_not_finite_is_shown():
    report = report_l2_norm_grad(chunk_of(a=scalar(math.nan), b=scalar(1)))
    assert math.isnan(report[f"{P}a"])
    assert report[f"{P}b"] == 1.0
    assert math.isnan(report[f"{P}global"])


def test_a_training_step_agrees_with_plain_torch():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model(torch.randn(32, 8)).square().mean().backward()
    report = report_l2_norm_grad(model)
    for name, parameter in model.named_parameters():
        assert report[f"{P}{name}"] == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert report[f"{P}global"] == pytest.approx(total, rel=1e-5)


def test_one_transfer_for_all_parameters(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(1), tolist(t))[1])

    class NoItem(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func)
            return func(*args, **(kwargs or {}))

    with NoItem():
        report_l2_norm_grad(chunk_of(**{f"p{i}": torch.ones(i + 1) for i in range(20)}))
    assert len(reads) == 1


def sharded_over_a_group():
    rank = dist.get_rank()
    module = chunk_of(split=scalar([3, 4][rank]), whole=scalar(12))
    module.split.tensor_model_parallel = True
    module.whole.tensor_model_parallel = False
    local = report_l2_norm_grad(module)
    return local, report_l2_norm_grad(module, group=dist.group.WORLD)


def test_a_group_gives_the_norm_of_the_whole_model():
    (local_0, whole_0), (local_1, whole_1) = run_ranks(sharded_over_a_group, 2)
    assert local_0[f"{P}global"] == pytest.approx(math.hypot(3, 12))
    assert local_1[f"{P}global"] == pytest.approx(math.hypot(4, 12))
    assert whole_0 == whole_1 == {f"{P}split": 5.0, f"{P}whole": 12.0, f"{P}global": 13.0}


def dtensor_gradients():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6, dtype=torch.float32)
    module = torch.nn.Module()
    for name, placement in (("shard", Shard(0)), ("copy", Replicate())):
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(6), mesh, [placement]))
        parameter.grad = distribute_tensor(whole, mesh, [placement])
        setattr(module, name, parameter)
    module.plain = torch.nn.Parameter(torch.zeros(1))
    module.plain.grad = scalar(2)
    report = report_l2_norm_grad(module)
    module.copy.main_grad = DTensor.from_local(torch.ones(6), mesh, [Partial()])
    try:
        report_l2_norm_grad(module)
    except RuntimeError as error:
        return report, str(error)


def test_dtensor_gradients_are_summed_over_their_shards():
    norm = math.sqrt(0 + 1 + 4 + 9 + 16 + 25)
    expected = {
        f"{P}shard": norm,
        f"{P}copy": norm,
        f"{P}plain": 2.0,
        f"{P}global": math.sqrt(2 * norm**2 + 4),
    }
    for report, error in run_ranks(dtensor_gradients, 2):
        assert report == pytest.approx(expected)
        assert "redistribute it first" in error
