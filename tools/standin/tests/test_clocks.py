"""Programs without a wait read poison or are refused, and with it they read numbers."""

import math

import pytest
import torch

from standin.clocks import RaceError


def is_poison(tensor):
    return all(math.isnan(value) for value in tensor.cpu().tolist())


def test_a_stream_reads_poison_until_it_has_waited_for_the_writer(accelerator):
    tensor, side = torch.ones(3, device=accelerator), torch.Stream(accelerator)
    with side:
        assert is_poison(tensor * 2)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        made = tensor * 2
        event = side.record_event()
        late = made.add(1)
    assert is_poison(made + 0)
    torch.accelerator.current_stream().wait_event(event)
    assert (made + 0).tolist() == [2.0] * 3
    assert is_poison(late + 0)
    side.synchronize()
    assert (late + 0).tolist() == [3.0] * 3


OVERWRITTEN = {
    "input": lambda tensor: tensor * 2,
    "part of an input": lambda tensor: tensor[1:] * 2,
    "result": lambda tensor: tensor.fill_(2),
    "copied": lambda tensor: torch.ones(3, pin_memory=True).copy_(tensor, non_blocking=True),
}
OVERWRITERS = {
    "in place": lambda tensor: tensor.add_(1),
    "copy": lambda tensor: tensor.copy_(torch.ones(3), non_blocking=True),
    "result": lambda tensor: torch.add(1, torch.ones_like(tensor), out=tensor),
    "list": lambda tensor: torch._foreach_zero_([tensor]),
}


@pytest.mark.parametrize("use", OVERWRITTEN.values(), ids=OVERWRITTEN)
@pytest.mark.parametrize("overwrite", OVERWRITERS.values(), ids=OVERWRITERS)
def test_memory_that_another_stream_may_use_is_not_overwritten(accelerator, use, overwrite):
    side, tensor = torch.Stream(accelerator), torch.ones(3, device=accelerator)
    side.wait_stream(torch.accelerator.current_stream())
    use(tensor)
    with side, pytest.raises(RaceError, match=r"is changed at \S*test_clocks.py:\d+ while another"):
        overwrite(tensor)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        overwrite(tensor)
    assert is_poison(tensor + 0)


def test_only_the_written_part_is_poison(accelerator):
    side, tensor = torch.Stream(accelerator), torch.zeros(4, device=accelerator)
    torch.accelerator.synchronize()  # the host's knowledge is that of all later launches
    tensor[:2].add_(1)
    with side:
        tensor[2:].add_(1)
    values = (tensor + 0).tolist()
    assert values[:2] == [1.0, 1.0]
    assert all(map(math.isnan, values[2:]))


@pytest.mark.parametrize(("dtype", "poison"), [(torch.float32, math.nan), (torch.int64, -1)])
def test_pinned_memory_is_poison_until_the_host_waits(accelerator, dtype, poison):
    pinned, pageable = torch.zeros(2, dtype=dtype, pin_memory=True), torch.zeros(2, dtype=dtype)
    for host in (pageable, pinned):
        host.copy_(torch.ones(2, dtype=dtype, device=accelerator), non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert pageable.tolist() == [1, 1]
    assert pinned.tolist() == pytest.approx([poison] * 2, nan_ok=True)
    assert not event.query()
    assert event.query()
    assert pinned.tolist() == [1, 1]
    assert (pinned.is_pinned(), pageable.is_pinned()) == (True, False)


@pytest.mark.parametrize("waits", [False, True])
def test_a_pinned_source_may_change_after_a_wait(accelerator, waits):
    sources = torch.ones(3).pin_memory(), torch.ones(3)
    copies = [source.to(accelerator, non_blocking=True) for source in sources]
    if waits:
        torch.accelerator.synchronize()
    for source in sources:
        source.zero_()
    if waits:
        assert [copied.tolist() for copied in copies] == [[1.0] * 3] * 2
    else:
        with pytest.raises(
            RaceError, match=r"before its copy to the device, at .*test_clocks.py:\d+"
        ):
            torch.accelerator.synchronize()


def test_times_need_events_that_were_reached(accelerator):
    first, last = (torch.Event(accelerator, enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(torch.accelerator.current_stream().record_event())
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
