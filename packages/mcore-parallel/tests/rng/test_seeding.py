"""Seeds of the streams of a rank in a model-parallel job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel import ProcessGroups, use_process_groups
from mcore.parallel.rng import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from mcore.parallel.rng.shared import rng_stream_seeds

pytestmark = pytest.mark.usefixtures("no_tracker_yet")

DATA, MODEL, EXPERT = "data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def seed_default_device(seed: int, **options: Any) -> None:
    model_parallel_cuda_manual_seed(seed, device=torch.get_default_device(), **options)


def first_numbers() -> dict[str, list[float]]:
    tracker, drawn = get_cuda_rng_tracker(), {"default": torch.rand(3).tolist()}
    for name in tracker.get_states():
        with tracker.fork(name):
            drawn[name] = torch.rand(3).tolist()
    return drawn


def new_generator(seed: int) -> torch.Generator:
    """A separate generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def numbers(seed: int) -> list[float]:
    return torch.rand(3, generator=new_generator(seed)).tolist()


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("graph_safe", [False, True])
def test_streams_and_default_numbers_have_the_seeds_of_the_formula(graph_safe: bool) -> None:
    seed_default_device(1234, tp_rank=1, ep_rank=1, etp_rank=0, use_cudagraphable_rng=graph_safe)
    assert list(get_cuda_rng_tracker().get_states()) == [DATA, MODEL, EXPERT]
    assert first_numbers() == {
        "default": numbers(1234),
        DATA: numbers(1234),
        MODEL: numbers(3953),
        EXPERT: numbers(2358),
    }


@pytest.mark.usefixtures("on_each_device")
def test_ranks_default_to_zero() -> None:
    assert rng_stream_seeds(7) == {DATA: 7, MODEL: 2725, EXPERT: 1031}
    seed_default_device(7)
    assert first_numbers()[MODEL] == numbers(2725)


@pytest.mark.usefixtures("on_each_device")
def test_seeding_again_repeats_the_numbers() -> None:
    seed_default_device(5)
    tracker, first = get_cuda_rng_tracker(), first_numbers()
    assert first_numbers() != first
    seed_default_device(5)
    assert get_cuda_rng_tracker() is tracker
    assert first_numbers() == first


@pytest.mark.parametrize("rank", range(8))
def test_ranks_come_from_the_default_process_groups(
    fake_world: Callable[..., None], rank: int
) -> None:
    fake_world(rank, 8)
    with use_process_groups(ProcessGroups.from_sizes(tp=4, ep=2, expt_tp=2)):
        seed_default_device(100)
    drawn = first_numbers()
    assert drawn[MODEL] == numbers(100 + 2718 + rank % 4)
    assert drawn[EXPERT] == numbers(100 + 1024 + 100 * (rank // 2 % 2) + rank % 2)
    assert drawn["default"] == drawn[DATA] == numbers(100)


def test_equal_seeds_name_both_streams_and_leave_everything_as_it_was() -> None:
    seed_default_device(3)
    tracker, state = get_cuda_rng_tracker(), torch.get_rng_state()
    before = tracker.get_states()
    with pytest.raises(ValueError, match="model-parallel-rng and expert-parallel-rng") as caught:
        seed_default_device(1, tp_rank=6, ep_rank=17, etp_rank=0, force_reset_rng=True)
    assert "2725" in str(caught.value)
    assert "tp_rank=6, ep_rank=17, etp_rank=0" in str(caught.value)
    assert get_cuda_rng_tracker() is tracker
    assert tracker.get_states() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be an int >= 0, got -1"),
        ({"seed": 1.5}, "seed must be an int >= 0, got 1.5"),
        ({"seed": "1"}, "seed must be an int >= 0, got '1'"),
        ({"seed": 1, "tp_rank": -1}, "tp_rank must be"),
        ({"seed": 1, "ep_rank": -2}, "ep_rank must be"),
        ({"seed": 1, "etp_rank": 0.5}, "etp_rank must be"),
        ({"seed": 2**64 - 2718}, "exceeds 64 bits"),
    ],
)
def test_bad_seeds_and_ranks_are_refused_before_anything_changes(
    arguments: dict[str, Any], message: str
) -> None:
    seed_default_device(3)
    before = get_cuda_rng_tracker().get_states()
    with pytest.raises(ValueError, match=message):
        seed_default_device(**arguments)
    assert get_cuda_rng_tracker().get_states() == before


def test_a_device_that_does_not_exist_is_refused_before_anything_changes() -> None:
    seed_default_device(3)
    tracker, before = get_cuda_rng_tracker(), get_cuda_rng_tracker().get_states()
    with pytest.raises(RuntimeError, match="cuda:99"):
        model_parallel_cuda_manual_seed(4, device="cuda:99", force_reset_rng=True)
    assert get_cuda_rng_tracker() is tracker
    assert tracker.get_states() == before


def test_the_device_given_is_the_one_that_is_seeded() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.device = "cuda:99"
    with pytest.raises(RuntimeError, match="cuda:99"):
        model_parallel_cuda_manual_seed(5)
    model_parallel_cuda_manual_seed(5, device="cpu")
    assert tracker.device == torch.device("cpu")
    assert torch.initial_seed() == 5
    assert first_numbers()[MODEL] == numbers(5 + 2718)


@pytest.mark.usefixtures("on_each_device")
def test_the_largest_seed_works() -> None:
    seed_default_device(2**64 - 1 - 2718)
    assert first_numbers()[MODEL] == numbers(2**64 - 1)


def test_force_makes_a_tracker_of_the_new_kind() -> None:
    seed_default_device(1)
    old = get_cuda_rng_tracker()
    seed_default_device(1, use_cudagraphable_rng=True, force_reset_rng=True)
    new = get_cuda_rng_tracker()
    assert new is not old
    assert all(isinstance(state, torch.Generator) for state in new.get_states().values())


@pytest.mark.usefixtures("on_each_device")
def test_an_inference_tracker_gets_no_streams_but_the_default_numbers_are_seeded() -> None:
    seed_default_device(9, inference_rng_tracker=True)
    assert first_numbers() == {"default": numbers(9)}


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**40),
    tp_rank=st.integers(0, 2000),
    ep_rank=st.integers(0, 40),
    etp_rank=st.integers(0, 200),
)
def test_the_formula_holds_or_the_collision_is_real(
    seed: int, tp_rank: int, ep_rank: int, etp_rank: int
) -> None:
    model, expert = seed + 2718 + tp_rank, seed + 1024 + 100 * ep_rank + etp_rank
    if model == expert:
        with pytest.raises(ValueError, match=str(model)):
            rng_stream_seeds(seed, tp_rank, ep_rank, etp_rank)
    else:
        assert rng_stream_seeds(seed, tp_rank, ep_rank, etp_rank) == {
            DATA: seed,
            MODEL: model,
            EXPERT: expert,
        }


def test_streams_of_all_ranks_differ_within_the_documented_bounds() -> None:
    tensor_ranks, expert_ranks, expert_tensor_ranks = 1024, 17, 94
    model = {rng_stream_seeds(1, tp_rank=tp)[MODEL] for tp in range(tensor_ranks)}
    expert = {
        rng_stream_seeds(1, ep_rank=ep, etp_rank=etp)[EXPERT]
        for ep in range(expert_ranks)
        for etp in range(expert_tensor_ranks)
    }
    assert len(model) == tensor_ranks
    assert len(expert) == expert_ranks * expert_tensor_ranks
    assert model.isdisjoint(expert)
    assert rng_stream_seeds(1, ep_rank=17)[EXPERT] in model
    next_stage = rng_stream_seeds(1 + 100, ep_rank=0)[EXPERT]
    assert rng_stream_seeds(1, ep_rank=1)[EXPERT] == next_stage


@pytest.mark.cuda
@needs_cuda
def test_the_cpu_is_seeded_where_it_is_given_and_the_gpu_is_not() -> None:
    """Checks on a GPU machine that ``device`` decides, and not the current accelerator."""
    state = torch.cuda.get_rng_state()
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True, device="cpu")
    assert get_cuda_rng_tracker().device == torch.device("cpu")
    assert first_numbers()[MODEL] == numbers(1234 + 2718)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.cuda
@needs_cuda
def test_a_gpu_is_seeded_by_default_and_the_cpu_is_not() -> None:
    """Checks that the current GPU's default numbers and streams are seeded, and no others."""
    state = torch.get_rng_state()
    model_parallel_cuda_manual_seed(1234, tp_rank=1, force_reset_rng=True)
    generator = torch.Generator("cuda").manual_seed(1234)
    expected = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    generator.manual_seed(3953)
    with get_cuda_rng_tracker().fork():
        drawn = torch.rand(3, device="cuda")
    assert torch.equal(drawn, torch.rand(3, device="cuda", generator=generator))
    assert torch.equal(torch.get_rng_state(), state)
