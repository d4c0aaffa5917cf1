"""Wrong programs read poison, and the same programs with their waits read numbers."""

import math

import pytest
import torch

from standin.clocks import RaceError


def is_poison(tensor):
    return all(math.isnan(value) for value in tensor.cpu().tolist())


def test_a_kernel_on_a_side_stream_reads_poison_without_a_wait(accelerator):
    tensor, side = torch.ones(3, device=accelerator), torch.Stream(accelerator)
    with side:
        assert is_poison(tensor * 2)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        assert (tensor * 2).tolist() == [2.0] * 3


def test_a_result_of_a_side_stream_is_poison_until_its_event(accelerator):
    side = torch.Stream(accelerator)
    with side:
        made = torch.full((3,), 2.0, device=accelerator)
        event = side.record_event()
        late = made.add(1)
    assert is_poison(made + 0)
    torch.accelerator.current_stream().wait_event(event)
    assert (made + 0).tolist() == [2.0] * 3
    assert is_poison(late + 0)
    side.synchronize()
    assert (late + 0).tolist() == [3.0] * 3


def test_in_place_results_of_poison_stay_poison(accelerator):
    side, tensor = torch.Stream(accelerator), torch.ones(2, device=accelerator)
    with side:
        tensor.add_(1)
    torch.accelerator.synchronize()
    assert is_poison(tensor)


def test_only_the_written_part_is_poison(accelerator):
    side, tensor = torch.Stream(accelerator), torch.zeros(4, device=accelerator)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor[2:].fill_(1)
    values = (tensor + 0).tolist()
    assert values[:2] == [0.0, 0.0]
    assert all(map(math.isnan, values[2:]))


def test_pinned_memory_is_poison_until_the_host_waits(accelerator):
    pinned = torch.zeros(3, pin_memory=True)
    assert pinned.is_pinned()
    pinned.copy_(torch.ones(3, device=accelerator), non_blocking=True)
    assert is_poison(pinned)
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1.0] * 3
    counts = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    event = torch.Event(accelerator)
    counts.copy_(torch.ones(2, dtype=torch.int64, device=accelerator), non_blocking=True)
    event.record()
    assert counts.tolist() == [-1, -1]
    assert not event.query()
    assert event.query()
    assert counts.tolist() == [1, 1]


def test_pageable_memory_is_complete_at_once(accelerator):
    host = torch.zeros(3)
    host.copy_(torch.ones(3, device=accelerator), non_blocking=True)
    assert host.tolist() == [1.0] * 3
    assert not host.is_pinned()


def test_a_pinned_source_must_not_change_before_the_copy(accelerator):
    source = torch.ones(3).pin_memory()
    copied = source.to(accelerator, non_blocking=True)
    source.zero_()
    with pytest.raises(RaceError, match=r"test_clocks.py:\d+"):
        torch.accelerator.synchronize()
    pageable = torch.ones(3)
    copied = pageable.to(accelerator, non_blocking=True)
    pageable.zero_()
    torch.accelerator.synchronize()
    assert copied.tolist() == [1.0] * 3


def test_a_pinned_source_may_change_after_a_wait(accelerator):
    source = torch.ones(3).pin_memory()
    copied = source.to(accelerator, non_blocking=True)
    torch.accelerator.current_stream().record_event().synchronize()
    source.zero_()
    assert copied.tolist() == [1.0] * 3


def test_the_host_carries_its_knowledge_to_other_streams(accelerator):
    tensor, side = torch.ones(3, device=accelerator), torch.Stream(accelerator)
    torch.accelerator.synchronize()
    with side:
        assert (tensor * 2).tolist() == [2.0] * 3


def test_copies_between_devices_wait_for_both(accelerator):
    there = torch.ones(3, device=accelerator).to("standin:1")
    assert (there * 2).tolist() == [2.0] * 3


def test_times_need_events_that_were_reached(accelerator):
    first, last = (torch.Event(accelerator, enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    untimed = torch.Event(accelerator)
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(untimed)
    with pytest.raises(RuntimeError, match="does not match"):
        first.record(torch.Stream("standin:1"))


ABSENT = {
    "unscale": (torch.bfloat16, lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        [x], torch.zeros(1, device=x.device), torch.ones(1, device=x.device))),
    "addmm_cuda": (torch.int64, lambda x: x.view(2, 2) @ x.view(2, 2)),
    "baddbmm_cuda": (torch.uint8, lambda x: x.view(1, 2, 2) @ x.view(1, 2, 2)),
    "mul_cuda": (torch.float8_e4m3fn, lambda x: x * x),
    "ufunc_add_CUDA": (torch.float8_e5m2, lambda x: x + x),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_kernels_that_cuda_lacks_are_refused(accelerator, name):
    dtype, call = ABSENT[name]
    tensor = torch.ones(4).to(accelerator, dtype)
    with pytest.raises(NotImplementedError, match=f"{name}.* not implemented for"):
        call(tensor)
    call(tensor.float())
