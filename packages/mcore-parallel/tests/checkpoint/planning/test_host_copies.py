"""Copies of accelerator tensors for saves: complete, in bounded pinned memory, without waits."""

import inspect
import threading

import pytest
import torch

from mcore.parallel.checkpoint import (
    load_sharded_state_dict,
    make_sharded_tensor_for_checkpoint,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.planning import staging
from mcore.parallel.checkpoint.planning.staging import _PinnedRing
from standin import no_host_waits, recorded

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.fixture
def ring(accelerator, monkeypatch):
    """A small ring of this test instead of that of the process."""
    small = _PinnedRing(4096, 1024)
    monkeypatch.setattr(staging, "_ring", small)
    return small


def make_tensors(lengths):
    return [
        torch.randint(0, 2, (length,)).to(DTYPES[number % len(DTYPES)])
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("lengths", [[5], [0, 1, 7], [100] * 50, [3000, 1, 4096, 2, 2500, 900] * 3])
def test_any_number_and_size_of_tensors_goes_through_the_buffer(ring, accelerator, lengths):
    tensors = make_tensors(lengths)
    copies = [ring.start(tensor.to(accelerator)) for tensor in tensors]
    ring.finish(ring.num_started)
    assert ring._buffer is None or ring._buffer.is_pinned()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.device.type == "cpu"
        assert torch.equal(copy, tensor)


def test_a_wait_for_one_copy_leaves_the_later_ones_running(ring, accelerator):
    first = ring.start(torch.ones(9, device=accelerator))
    number = ring.num_started
    ring.start(torch.ones(9, device=accelerator))
    ring.finish(number)
    assert torch.equal(first, torch.ones(9))
    assert len(ring._pieces) == 1


def test_the_source_may_change_at_once_and_nothing_waits(ring, accelerator):
    sources = [torch.full((30,), float(number), device=accelerator) for number in range(20)]
    with no_host_waits():
        copies = [staging.start_host_copy(source) for source in sources]
        for source in sources:
            source.zero_()
    staging._ring.finish(staging._ring.num_started)
    assert [copy.unique().tolist() for copy in copies] == [[float(number)] for number in range(20)]


def test_what_another_stream_writes_is_copied_after_it(ring, accelerator):
    stream = torch.Stream(accelerator)
    source = torch.zeros(8, device=accelerator)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        source.add_(1)
        copy = ring.start(source)
    ring.finish(ring.num_started)
    assert torch.equal(copy, torch.ones(8))


def test_views_and_strides_are_copied_in_row_major_order(ring, accelerator):
    table = torch.arange(12.0).view(3, 4)
    for view in (
        table.t(),
        table[:, 1:3],
        table[1],
        torch.view_as_complex(table.view(6, 2)).conj(),
    ):
        on_device = view.to(accelerator)
        copy = staging.start_host_copy(on_device)
        staging._ring.finish(staging._ring.num_started)
        assert torch.equal(copy, view)
        assert copy.is_contiguous()


def test_threads_share_the_buffer(ring, accelerator):
    failed = []

    def work(value):
        source = torch.full((700,), value, device=accelerator)
        for _ in range(20):
            copy = staging.start_host_copy(source)
            staging._ring.finish(staging._ring.num_started)
            if not torch.equal(copy, torch.full((700,), value)):
                failed.append(value)

    threads = [threading.Thread(target=work, args=(float(value),)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def state_of(tensors):
    return {
        f"w{number}": make_sharded_tensor_for_checkpoint(tensor, f"w{number}")
        for number, tensor in enumerate(tensors)
    }


@pytest.mark.parametrize("async_", [True, False])
def test_a_save_of_device_tensors_is_what_they_held_at_the_call(
    ring, accelerator, tmp_path, async_
):
    wanted = [torch.randn(50, 7), torch.randn(2000), torch.randn(1)]
    tensors = [tensor.to(accelerator) for tensor in wanted]
    handle = save_sharded_state_dict(state_of(tensors), tmp_path / "step_1", async_=async_)
    for tensor in tensors:
        tensor.zero_()
    if handle is not None:
        handle.result()
    found = state_of([torch.zeros_like(tensor, device=accelerator) for tensor in wanted])
    loaded = load_sharded_state_dict(found, tmp_path / "step_1")
    for number, tensor in enumerate(wanted):
        assert torch.equal(loaded[f"w{number}"].cpu(), tensor)


def test_saves_keep_one_bounded_pinned_buffer(ring, accelerator, tmp_path):
    tensors, buffers = [torch.randn(2000, device=accelerator) for _ in range(4)], set()
    lines, first = inspect.getsourcelines(_PinnedRing._empty_oldest)
    in_the_ring = range(first, first + len(lines))
    for step, async_ in enumerate((True, False, True, False)):
        with recorded() as record:
            handle = save_sharded_state_dict(
                state_of(tensors), tmp_path / f"step_{step}", async_=async_
            )
            if handle is not None:
                handle.result()
        assert ring._buffer.nbytes == 4096
        buffers.add(ring._buffer.data_ptr())
        assert record.waits or accelerator.type == "cuda"  # which counts none
        assert {int(line.rpartition(":")[2]) for _, line in record.waits} <= {*in_the_ring}
    assert len(buffers) == 1
