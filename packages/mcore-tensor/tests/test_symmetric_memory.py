import logging
import math
import sys
import warnings

import pytest
import torch
import torch.distributed as dist

import mcore.tensor.symmetric_memory as symmetric_memory_module
from mcore.tensor import GlobalSymmetricMemoryBuffer
from rank_testing import RankFailure, run_ranks

NOTHING = {"tensor": None, "handle": None}

needs_no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="for machines without accelerator"
)


def buffer_of_16_bytes():
    buffer = GlobalSymmetricMemoryBuffer(1, None)
    buffer.symm_buffer = torch.arange(16, dtype=torch.uint8)
    buffer.symm_mem_hdl = object()
    return buffer


def build_without_warnings(size_in_mb=1):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = GlobalSymmetricMemoryBuffer(size_in_mb, None)
    return (
        buffer.maybe_get_tensor((2, 3), torch.bfloat16),
        buffer._can_allocate(1, torch.uint8),
        buffer.available,
        buffer.init_failure_reason,
    )


def test_without_init_it_is_not_available():
    assert build_without_warnings() == (
        NOTHING, False, False, "torch.distributed is not initialised",
    )  # fmt: skip


@needs_no_accelerator
@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_cpu_ranks_it_is_not_available_and_all_agree(world):
    results = run_ranks(build_without_warnings, world)
    assert results == [results[0]] * world
    found, can_allocate, available, reason = results[0]
    assert (found, can_allocate, available) == (NOTHING, False, False)
    assert "no accelerator" in reason


def reason_in_one_of_two_groups():
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    own = dist.get_rank() // 2
    return GlobalSymmetricMemoryBuffer(1 + own, pairs[own]).init_failure_reason


@needs_no_accelerator
def test_only_the_ranks_of_the_group_agree_on_a_size():
    assert all("no accelerator" in reason for reason in run_ranks(reason_in_one_of_two_groups, 4))


def test_the_reason_is_logged_once_for_debugging(caplog):
    with caplog.at_level(logging.DEBUG):
        GlobalSymmetricMemoryBuffer(1, None)
    own = symmetric_memory_module.logger.name  # other threads' libraries may log as well
    (record,) = (record for record in caplog.records if record.name == own)
    assert record.levelno == logging.DEBUG
    assert "torch.distributed is not initialised" in record.getMessage()


@pytest.mark.parametrize("size", [0, -1, 0.0, -0.5, math.nan, math.inf, 1e-9, 1e300])
def test_sizes_that_make_no_sense_are_refused(size):
    with pytest.raises(ValueError, match="size_in_mb must be"):
        GlobalSymmetricMemoryBuffer(size, None)


def test_the_largest_size_is_the_one_in_the_message():
    with pytest.raises(ValueError, match=f"at most {2**30}, got {2**30 + 1}"):
        GlobalSymmetricMemoryBuffer(2**30 + 1, None)
    assert not GlobalSymmetricMemoryBuffer(2**30, None).available


@pytest.mark.parametrize("size", ["3", None, torch.tensor(3.0), [1]])
def test_sizes_that_are_no_numbers_are_refused(size):
    with pytest.raises(TypeError, match="size_in_mb must be a number, got"):
        GlobalSymmetricMemoryBuffer(size, None)


def build_with_one_bad_size():
    """One rank after the other gives a bad size; all ranks go on together afterwards."""
    pretend_to_have_an_accelerator()
    errors = []
    for turn, bad in enumerate((0, -1.0, math.nan, math.inf, "3", None, 1e300)):
        size = bad if dist.get_rank() == turn % dist.get_world_size() else 1
        try:
            GlobalSymmetricMemoryBuffer(size, None)
        except (TypeError, ValueError) as error:
            errors.append((type(error).__name__, str(error)))
    buffer = GlobalSymmetricMemoryBuffer(1, None)
    return errors, buffer.symm_mem_hdl


def test_an_invalid_size_on_one_rank_is_an_error_on_every_rank():
    results = run_ranks(build_with_one_bad_size, 2)
    for rank, (errors, handle) in enumerate(results):
        assert handle == ("handle", 1 << 20, 2)
        assert len(errors) == 7
        for turn, (kind, message) in enumerate(errors):
            if turn % 2 == rank:
                assert kind == ("TypeError" if turn in (4, 5) else "ValueError")
                assert message.startswith("size_in_mb must be")
            else:
                assert kind == "ValueError"
                assert "size_in_mb is invalid on another rank" in message


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((4,), torch.float32, True),
        ((2, 2), torch.float32, True),
        ((5,), torch.float32, False),
        ((0,), torch.float32, True),
        ((), torch.float64, True),
        (16, torch.uint8, True),
        (17, torch.uint8, False),
        (torch.Size([2, 1, 4]), torch.bfloat16, True),
    ],
)
def test_what_fits_into_the_buffer(shape, dtype, fits):
    buffer = buffer_of_16_bytes()
    found = buffer.maybe_get_tensor(shape, dtype)
    assert set(found) == {"tensor", "handle"}
    if not fits:
        assert found == NOTHING
        return
    assert found["handle"] is buffer.symm_mem_hdl
    assert found["tensor"].shape == torch.Size((shape,) if isinstance(shape, int) else shape)
    assert found["tensor"].dtype == dtype
    if found["tensor"].numel():
        assert found["tensor"].data_ptr() == buffer.symm_buffer.data_ptr()


def test_every_request_starts_at_the_beginning():
    buffer = buffer_of_16_bytes()
    whole = buffer.maybe_get_tensor((4,), torch.float32)["tensor"]
    part = buffer.maybe_get_tensor((2,), torch.float32)["tensor"]
    whole.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert part.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("numel", "dtype", "expected"),
    [
        (16, torch.uint8, True),
        (17, torch.uint8, False),
        (4, torch.float32, True),
        (0, torch.int64, True),
    ],
)
def test_can_allocate_up_to_an_exact_fit(numel, dtype, expected):
    assert buffer_of_16_bytes()._can_allocate(numel, dtype) is expected


def test_negative_sizes_are_refused():
    buffer = buffer_of_16_bytes()
    for call in (
        lambda: buffer._can_allocate(-1, torch.uint8),
        lambda: buffer.maybe_get_tensor((-1, 2), torch.uint8),
        lambda: buffer.maybe_get_tensors([(-1, torch.uint8)]),
        lambda: GlobalSymmetricMemoryBuffer(1, None)._can_allocate(-1, torch.uint8),
    ):
        with pytest.raises(ValueError, match="negative"):
            call()


def test_allocate_gives_a_flat_view_or_an_error():
    buffer = buffer_of_16_bytes()
    flat = buffer._allocate(3, torch.int32)
    assert flat.shape == (3,)
    assert flat.data_ptr() == buffer.symm_buffer.data_ptr()
    with pytest.raises(RuntimeError, match=r"cannot hold 5 elements .* it has 16 bytes"):
        buffer._allocate(5, torch.float32)
    with pytest.raises(RuntimeError, match="none is available"):
        GlobalSymmetricMemoryBuffer(1, None)._allocate(1, torch.uint8)


def test_a_handle_or_a_buffer_alone_is_not_enough():
    buffer = buffer_of_16_bytes()
    buffer.symm_mem_hdl = None
    assert not buffer.available
    assert buffer.maybe_get_tensor((1,), torch.uint8) == NOTHING
    buffer.symm_mem_hdl, buffer.symm_buffer = object(), None
    assert not buffer.available
    assert buffer.maybe_get_tensor((1,), torch.uint8) == NOTHING


def test_several_pieces_do_not_overlap_and_are_aligned():
    buffer = buffer_of_16_bytes()
    found = buffer.maybe_get_tensors([(3, torch.uint8), (1, torch.float32)], 4)
    assert found["handle"] is buffer.symm_mem_hdl
    assert [offset for _, offset in found["tensors"]] == [0, 4]
    assert [piece.tolist() for piece, _ in found["tensors"]] == [[0, 1, 2], [4, 5, 6, 7]]
    assert buffer.maybe_get_tensors([(3, torch.uint8), (4, torch.float32)], 4) == {
        "handle": None,
        "tensors": None,
    }
    assert buffer.maybe_get_tensors([(1, torch.uint8), (1, torch.uint8)])["tensors"] is None
    assert buffer.maybe_get_tensors([])["tensors"] == []
    assert GlobalSymmetricMemoryBuffer(1, None).maybe_get_tensors([])["tensors"] is None
    with pytest.raises(ValueError, match="alignment must be positive, got 0"):
        buffer.maybe_get_tensors([(1, torch.uint8)], 0)
    with pytest.raises(TypeError, match="alignment must be an integer, got str"):
        buffer.maybe_get_tensors([], "16")


def pretend_to_have_an_accelerator(fails_to_allocate=(), fails_to_meet=()):
    """Stand-ins for the two functions of torch that need hardware, on CPU memory."""
    import torch.distributed._symmetric_memory as torch_symmetric_memory

    calls = []

    def empty(num_bytes, *, dtype, device):
        calls.append("empty")
        if dist.get_rank() in fails_to_allocate:
            raise torch.OutOfMemoryError("no room")
        return torch.empty(num_bytes, dtype=dtype)

    def rendezvous(tensor, group):
        calls.append("rendezvous")
        if dist.get_rank() in fails_to_meet:
            raise RuntimeError("no multicast")
        return ("handle", tensor.numel(), dist.get_world_size(group))

    torch_symmetric_memory.empty = empty
    torch_symmetric_memory.rendezvous = rendezvous
    symmetric_memory_module.current_device = lambda: torch.device("xla", 0)
    return calls


def build_on_pretended_hardware(fails_to_allocate=(), fails_to_meet=(), sizes=(0.5,)):
    calls = pretend_to_have_an_accelerator(fails_to_allocate, fails_to_meet)
    buffer = GlobalSymmetricMemoryBuffer(sizes[dist.get_rank() % len(sizes)], None)
    return buffer.available, buffer.symm_mem_hdl, buffer.init_failure_reason, calls


@pytest.mark.parametrize("world", [1, 2, 4])
def test_memory_that_every_rank_can_allocate_is_shared(world):
    shared = (True, ("handle", 512 * 1024, world), None, ["empty", "rendezvous"])
    assert run_ranks(build_on_pretended_hardware, world) == [shared] * world


def test_if_one_rank_cannot_allocate_no_rank_has_memory():
    results = run_ranks(build_on_pretended_hardware, 4, (2,))
    elsewhere = (False, None, "another rank of the group has no symmetric memory", ["empty"])
    assert results[:2] + results[3:] == [elsewhere] * 3
    assert results[2] == (False, None, "OutOfMemoryError: no room", ["empty"])


def test_if_one_rank_cannot_meet_the_others_no_rank_has_memory():
    results = run_ranks(build_on_pretended_hardware, 2, (), (0,))
    assert [available for available, *_ in results] == [False, False]
    assert results[0][2] == "RuntimeError: no multicast"
    assert results[1][2] == "another rank of the group has no symmetric memory"


def test_unequal_sizes_are_an_error_on_every_rank():
    with pytest.raises(RankFailure) as caught:
        run_ranks(build_on_pretended_hardware, 2, (), (), (1, 2))
    assert [report.exception_type.rpartition(".")[2] for report in caught.value.ranks] == [
        "ValueError",
        "ValueError",
    ]
    for report in caught.value.ranks:
        assert "from 1048576 to 2097152 bytes" in report.message


def build_in_a_subgroup():
    pretend_to_have_an_accelerator()
    group = dist.new_group([0])
    buffer = GlobalSymmetricMemoryBuffer(1, group)
    return buffer.available, buffer.init_failure_reason


def test_a_rank_outside_of_the_group_has_no_memory():
    assert run_ranks(build_in_a_subgroup, 2) == [
        (True, None),
        (False, "this rank is not a member of the process group"),
    ]


def build_without_the_module():
    symmetric_memory_module.current_device = lambda: torch.device("xla", 0)
    sys.modules["torch.distributed._symmetric_memory"] = None
    return GlobalSymmetricMemoryBuffer(1, None).init_failure_reason


def test_a_missing_module_is_a_reason():
    for reason in run_ranks(build_without_the_module, 2):
        assert reason.startswith(("ModuleNotFoundError: ", "ImportError: "))
        assert "torch.distributed._symmetric_memory" in reason


def share_memory_between_gpus():
    torch.cuda.set_device(dist.get_rank())
    buffer = GlobalSymmetricMemoryBuffer(1, None)
    if not buffer.available:
        return None, buffer.init_failure_reason
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = buffer.maybe_get_tensor((4,), torch.float32)
    mine["tensor"].fill_(rank)
    mine["handle"].barrier()
    neighbour = mine["handle"].get_buffer((rank + 1) % world, (4,), torch.float32)
    return neighbour.tolist(), buffer.init_failure_reason


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs: memory that two of them share"
)
def test_gpus_read_each_others_memory():
    """Checks that memory is allocated and that a rank reads what its neighbour wrote."""
    world = 2
    results = run_ranks(share_memory_between_gpus, world, init="cuda:nccl")
    for rank, (values, reason) in enumerate(results):
        assert reason is None
        assert values == [float((rank + 1) % world)] * 4


def reduce_in_the_switch():
    torch.cuda.set_device(dist.get_rank())
    buffer = GlobalSymmetricMemoryBuffer(1, None)
    assert buffer.available, buffer.init_failure_reason
    if buffer.symm_mem_hdl.multicast_ptr == 0:
        return None
    mine = buffer.maybe_get_tensor((1024,), torch.bfloat16)["tensor"]
    mine.fill_(dist.get_rank() + 1)
    torch.ops.symm_mem.multimem_all_reduce_(mine, "sum", dist.group.WORLD.group_name)
    return mine.unique().tolist()


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than two GPUs: an all-reduce by NVLink SHARP"
)
def test_the_memory_serves_an_all_reduce_in_the_switch():
    """An all-reduce by NVLink SHARP on the buffer, where the machine has a multicast address."""
    results = run_ranks(reduce_in_the_switch, 2, init="cuda:nccl")
    assert results in ([[3.0], [3.0]], [None, None])
    if results == [None, None]:
        pytest.skip("no multicast address between these GPUs")


def allocate_on_one_gpu():
    buffer = GlobalSymmetricMemoryBuffer(1, None)
    found = buffer.maybe_get_tensor((8,), torch.float32)
    written = None if found["tensor"] is None else found["tensor"].fill_(3).tolist()
    return buffer.available, written, buffer.init_failure_reason


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: allocation on one GPU")
def test_one_gpu_allocates_or_says_why_not():
    """Checks that a world of one GPU has writable memory or a reason, and no error."""
    ((available, written, reason),) = run_ranks(allocate_on_one_gpu, 1, init="cuda:nccl")
    if available:
        assert (written, reason) == ([3.0] * 8, None)
    else:
        assert written is None
        assert reason
