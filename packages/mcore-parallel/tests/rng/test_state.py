"""Reading, setting and converting the state of a default random number generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mcore.parallel.rng import _get_cuda_rng_state, _set_cuda_rng_state, convert_cuda_rng_state
from mcore.parallel.rng.state import require_graph_safe_generators, resolve_rng_device

HAS_ACCELERATOR = torch.accelerator.is_available()
needs_no_accelerator = pytest.mark.skipif(
    HAS_ACCELERATOR, reason="is about machines without an accelerator"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def new_generator(seed: int) -> torch.Generator:
    """A separate generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def fresh(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=new_generator(seed))


@pytest.mark.parametrize("graph_safe", [False, True])
@pytest.mark.parametrize("clone", [False, True])
def test_a_state_that_was_read_repeats_the_numbers(graph_safe: bool, clone: bool) -> None:
    torch.manual_seed(7)
    torch.rand(3)
    state = _get_cuda_rng_state(torch.get_default_device(), clone=clone, graph_safe=graph_safe)
    drawn = torch.rand(5)
    _set_cuda_rng_state(state, torch.get_default_device(), graph_safe=graph_safe)
    assert torch.equal(torch.rand(5), drawn)
    assert torch.equal(drawn, fresh(7, 8)[3:])


@pytest.mark.usefixtures("on_each_device")
def test_a_plain_state_is_that_of_torch_and_does_not_change_with_draws(
    default_state: Callable[[], torch.Tensor],
) -> None:
    state = _get_cuda_rng_state(torch.get_default_device())
    assert state.dtype == torch.uint8
    assert torch.equal(state, default_state())
    before = state.clone()
    torch.rand(4)
    assert torch.equal(state, before)
    assert not torch.equal(default_state(), before)


@pytest.mark.usefixtures("on_each_device")
def test_a_plain_state_that_was_set_does_not_change_with_draws() -> None:
    state = new_generator(3).get_state()
    before = state.clone()
    _set_cuda_rng_state(state, torch.get_default_device())
    assert torch.equal(torch.rand(4), fresh(3, 4))
    assert torch.equal(state, before)


@pytest.mark.parametrize("graph_safe", [False, True])
def test_the_wrong_kind_of_state_names_the_conversion(graph_safe: bool) -> None:
    wrong = torch.zeros(2) if graph_safe else torch.Generator()
    with pytest.raises(TypeError, match=f"to_graphable={graph_safe}"):
        _set_cuda_rng_state(wrong, "cpu", graph_safe=graph_safe)


@needs_no_accelerator
def test_without_an_accelerator_the_defaults_mean_the_cpu() -> None:
    torch.manual_seed(11)
    state = _get_cuda_rng_state()
    drawn = torch.rand(2)
    _set_cuda_rng_state(state)
    assert torch.equal(torch.rand(2), drawn)
    for device in (-1, "cuda", torch.device("cuda"), "cpu", "cpu:0", torch.device("cpu")):
        assert resolve_rng_device(device) == torch.device("cpu")


@needs_no_accelerator
@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 1), 0, 3, "xpu", "meta"])
def test_an_accelerator_that_is_named_but_absent_is_refused(device: object) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        _get_cuda_rng_state(device)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="does not exist"):
        _set_cuda_rng_state(torch.get_rng_state(), device)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_each_device")
def test_conversion_keeps_the_sequence_both_ways() -> None:
    plain = new_generator(5).get_state()
    generator = convert_cuda_rng_state(plain, to_graphable=True, device=torch.get_default_device())
    assert torch.equal(torch.rand(3, generator=generator), fresh(5, 3))
    back = convert_cuda_rng_state(generator)
    assert torch.equal(torch.rand(3, generator=generator), fresh(5, 6)[3:])
    _set_cuda_rng_state(back, torch.get_default_device())
    assert torch.equal(torch.rand(3), fresh(5, 6)[3:])


def test_conversion_returns_what_has_the_form_already() -> None:
    generator = torch.Generator()
    plain = generator.get_state()
    assert convert_cuda_rng_state(generator, to_graphable=True) is generator
    assert convert_cuda_rng_state(plain) is plain
    with pytest.raises(TypeError, match="str"):
        convert_cuda_rng_state("state")  # type: ignore[arg-type]


@pytest.mark.skipif(
    hasattr(torch.cuda.CUDAGraph, "register_generator_state"),
    reason="is about builds of torch without that method",
)
def test_graph_safe_streams_on_cuda_need_a_build_that_registers_generators() -> None:
    require_graph_safe_generators(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="register_generator_state"):
        require_graph_safe_generators(torch.device("cuda", 0))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("graph_safe", [False, True])
def test_states_of_a_gpu_repeat_the_numbers(graph_safe: bool) -> None:
    """Checks reading and setting on a GPU, and that a graph-safe handle is live."""
    before = torch.cuda.get_rng_state()
    state = _get_cuda_rng_state(clone=True, graph_safe=graph_safe)
    drawn = torch.rand(5, device="cuda")
    live = _get_cuda_rng_state(graph_safe=True)
    _set_cuda_rng_state(state, graph_safe=graph_safe)
    assert torch.equal(torch.rand(5, device="cuda"), drawn)
    assert isinstance(live, torch.Generator)
    torch.cuda.set_rng_state(before)
    assert resolve_rng_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(RuntimeError, match="does not exist"):
        resolve_rng_device(torch.cuda.device_count())
