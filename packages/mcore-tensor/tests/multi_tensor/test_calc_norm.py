import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.tensor import calc_norm
from rank_testing import run_ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.usefixtures("on_each_device")
def test_no_tensors_and_empty_ones_have_norm_zero():
    for tensors in ([], iter([]), [torch.empty(0)], [torch.empty(0, 3, dtype=torch.half)]):
        norm = calc_norm(tensors)
        assert (norm.item(), norm.shape, norm.dtype) == (0.0, (), torch.float32)


@pytest.mark.parametrize("length", [1, 1000, 5000, 40_001, 300_001])
def test_several_dtypes_are_as_exact_as_float64(length):
    generator = torch.Generator().manual_seed(0)
    for make in (
        lambda: torch.randn(length, generator=generator),
        lambda: torch.full((length,), 1.7),
    ):
        tensors = [make().to(dtype).requires_grad_() for dtype in FLOATS]
        exact = torch.cat([tensor.detach().double() for tensor in tensors]).norm().item()
        norm = calc_norm(tensors)
        assert norm.item() == pytest.approx(exact, rel=2e-6)
        assert not norm.requires_grad


def test_parameters_that_are_gathered_late_are_completed_first():
    late = torch.nn.Parameter(torch.zeros(2))
    late._ensure_param_ready_callback = lambda: late.data.fill_(3.0)
    assert calc_norm([torch.full((2,), 4.0), late]).item() == pytest.approx(math.sqrt(50))


@pytest.mark.usefixtures("on_each_device")
def test_what_is_large_in_one_dtype_is_not_lost_in_another():
    large = torch.tensor([1e30], dtype=torch.double)
    for tensors in ([large, torch.ones(1)], [torch.ones(1), large]):
        assert calc_norm(tensors).item() == pytest.approx(1e30, rel=1e-6)
    assert math.isnan(calc_norm([torch.ones(3), torch.tensor([math.nan])]).item())
    assert calc_norm([torch.ones(3), torch.tensor([-math.inf])]).item() == math.inf


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(2, dtype=torch.int), r"tensors\[1\] has dtype torch.int32"),
        (torch.ones(2).to_sparse(), r"tensors\[1\] has layout torch.sparse_coo"),
        (3.0, r"tensors\[1\] must be a torch.Tensor, got float"),
    ],
)
def test_other_tensors_are_refused_by_index(wrong, message):
    with pytest.raises(TypeError, match=message):
        calc_norm([torch.ones(1), wrong])


@pytest.mark.usefixtures("on_each_device")
def test_a_tensor_is_not_taken_for_a_list_of_its_rows():
    with pytest.raises(TypeError, match="tensors must be a list of tensors"):
        calc_norm(torch.ones(3, 2))


@pytest.mark.usefixtures("on_each_device")
def test_meta_tensors_give_a_meta_norm_and_are_not_mixed():
    meta = torch.ones(3, device="meta")
    assert calc_norm([meta, meta.half()]).is_meta
    with pytest.raises(ValueError, match="mixes meta tensors"):
        calc_norm([torch.ones(1), meta])


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def norms_of_shards():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(n, 6, generator=generator) for n in (9, 1, 5, 3, 4)]
    whole[1] = whole[1].double() * 1e3
    whole[2] = whole[2].bfloat16()
    placements = [
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],  # one row over two ranks: one of them is empty
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ]
    tensors = [
        distribute_tensor(tensor, mesh, where)
        for tensor, where in zip(whole, placements, strict=True)
    ]
    plain = torch.full((7,), float(dist.get_rank()))
    exact = torch.cat([tensor.double().flatten() for tensor in [*whole, plain]]).norm()
    with HostReads() as reads:
        norm = calc_norm([tensors[0], plain, *tensors[1:]])
    partial = tensors[0].__class__.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    try:
        calc_norm([plain, partial])
    except ValueError as error:
        refused = str(error)
    one_dimensional = distribute_tensor(whole[0], mesh["tp"], [Shard(0)])
    alone = calc_norm([one_dimensional]).item() / whole[0].norm().item()
    return abs(norm.item() / exact.item() - 1), reads.count, refused, alone


def test_dtensors_are_summed_over_their_own_shards():
    for error, num_reads, refused, alone in run_ranks(norms_of_shards, 4):
        assert error < 2e-6
        assert num_reads == 0
        assert "tensors[1] is a DTensor with the placements (Partial(sum)" in refused
        assert alone == pytest.approx(1, rel=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: tensors on CPU and GPU")
def test_tensors_on_several_devices():
    """Checks that the norm is on the first device and that nothing waits for the GPU."""
    tensors = [torch.full((2,), 3.0, device="cuda"), torch.ones(5, device="cuda").half()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = calc_norm(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(math.sqrt(23))
    mixed = calc_norm([torch.full((2,), 4.0), *tensors])
    assert (mixed.device.type, mixed.item()) == ("cpu", pytest.approx(math.sqrt(55)))


def test_norms_whose_squares_overflow_float32_together_are_joined():
    tensors = [torch.tensor([1.5e19]), torch.tensor([1.5e19], dtype=torch.bfloat16)]
    expected = torch.cat([tensor.double() for tensor in tensors]).norm()
    assert torch.isclose(calc_norm(tensors).double(), expected)
