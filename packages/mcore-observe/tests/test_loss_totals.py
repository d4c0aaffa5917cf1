import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore.observe.loss_totals import (
    add_losses,
    add_step,
    count_iterations,
    loss_averages,
    reset_totals,
)

COUNTERS = ("advanced iterations", "skipped iterations", "nan iterations")


def test_losses_of_any_shape_and_type_are_summed_in_float32():
    totals = {}
    add_step(totals, {"a": torch.tensor(1.5), "b": torch.tensor([2.0], dtype=torch.bfloat16)}, 0)
    add_step(totals, {"a": torch.tensor([[0.5]]), "b": torch.tensor(4, dtype=torch.int64)}, 0)
    add_step(totals, {"a": 3.0}, 0)
    assert totals["a"].tolist() == [5.0]
    assert totals["b"].tolist() == [6.0]
    assert {totals[key].dtype for key in "ab"} == {torch.float32}


def test_the_loss_that_was_handed_over_is_never_changed():
    totals, loss = {}, torch.tensor([1.0])
    for _ in range(3):
        add_step(totals, {"a": loss}, 0)
    assert loss.tolist() == [1.0]
    assert totals["a"].tolist() == [3.0]


def test_a_loss_with_a_graph_keeps_none():
    totals = {}
    add_step(totals, {"a": torch.tensor(1.0, requires_grad=True) * 2}, 0)
    assert not totals["a"].requires_grad


def test_a_key_that_comes_later():
    totals = {}
    add_step(totals, {"a": torch.tensor(1.0)}, 0)
    add_step(totals, {"a": torch.tensor(1.0), "b": torch.tensor(5.0)}, 0)
    assert {k: v.tolist() for k, v in loss_averages(totals).items()} == {"a": [1.0], "b": [2.5]}


@pytest.mark.parametrize(
    ("loss", "is_nan"), [(1.0, 0), (math.nan, 1), (math.inf, 1), (-math.inf, 1)]
)
def test_nan_counts_on_skipped_steps_only(loss, is_nan):
    for skipped in (0, 1):
        totals = {}
        add_step(totals, {"fine": torch.tensor(1.0), "a": torch.tensor(loss)}, skipped)
        assert [totals[key] for key in COUNTERS] == [1 - skipped, skipped, is_nan * skipped]
        assert ("a" in totals) is not bool(skipped)


def test_a_skipped_step_reads_all_losses_in_one_transfer(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(1), tolist(t))[1])
    add_step({}, {f"loss {i}": torch.tensor(float(i)) for i in range(12)}, 1)
    assert len(reads) == 1


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(-1000, 1000).map(float), st.just(math.nan)), st.booleans())
    )
)
def test_averages_and_counts_of_any_history(history):
    totals = {}
    for loss, skipped in history:
        add_step(totals, {"a": torch.tensor(loss)}, int(skipped))
    advanced = [loss for loss, skipped in history if not skipped]
    skipped_losses = [loss for loss, skipped in history if skipped]
    assert count_iterations(totals) == len(history)
    assert totals.get("nan iterations", 0) == sum(map(math.isnan, skipped_losses))
    if advanced:
        average = loss_averages(totals)["a"].item()
        assert average == pytest.approx(sum(advanced) / len(advanced), rel=1e-5, nan_ok=True)
    reset_totals(totals)
    assert count_iterations(totals) == 0
    assert all(v.tolist() == [0.0] for v in loss_averages(totals).values())


def test_sums_of_another_kind_are_taken_up():
    totals = {"a": 2.0, "b": torch.tensor(3.0)}
    add_losses(totals, {"a": torch.tensor(1.0), "b": torch.tensor(1.0)})
    assert totals["a"].tolist() == [3.0]
    assert totals["b"].tolist() == [4.0]
    reset_totals(totals)
    assert totals["a"].tolist() == [0.0]
