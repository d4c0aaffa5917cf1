"""Sums of losses and counts of steps, which the caller of the training log keeps."""

import contextlib
import io
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

COUNTERS = ("advanced iterations", "skipped iterations", "nan iterations")


@pytest.fixture(scope="session")
def add_step(make_state, log_step):
    """Logs a step between two lines, which only adds to the sums."""
    state = make_state(step=1)

    def add(totals, losses, skipped=0):
        log_step(state, losses, totals, skipped=skipped)

    return add


def test_losses_of_any_shape_and_type_are_summed_in_float64(add_step):
    totals = {}
    add_step(totals, {"a": torch.tensor(1.5), "b": torch.tensor([2.0], dtype=torch.bfloat16)})
    add_step(totals, {"a": torch.tensor([[0.5]]), "b": torch.tensor(4, dtype=torch.int64)})
    add_step(totals, {"a": 3.0})
    assert totals["a"].tolist() == [5.0]
    assert totals["b"].tolist() == [6.0]
    assert {totals[key].dtype for key in "ab"} == {torch.float64}


def test_losses_in_another_order_and_a_part_of_them(add_step):
    totals, expected = {}, {}
    for step, names in enumerate(["abc", "cab", "b", "ca", "abcd", "dcba", "abcd"]):
        losses = {name: float(ord(name) + 10 * step) for name in names}
        add_step(totals, {name: torch.tensor(loss) for name, loss in losses.items()})
        expected |= {name: expected.get(name, 0.0) + losses[name] for name in names}
    assert {name: totals[name].item() for name in "abcd"} == expected
    assert [name for name in totals if name not in COUNTERS] == list("abcd")


def test_a_sum_that_the_caller_replaces_or_changes_counts_from_there(add_step):
    totals, losses = {}, {name: torch.tensor(1.0) for name in "abc"}
    add_step(totals, losses)
    totals["a"] = torch.tensor(10.0)
    totals["b"] += 20
    totals["c"] = totals["b"]
    add_step(totals, losses)
    add_step(totals, losses)
    assert [totals[name].item() for name in "abc"] == [12.0, 23.0, 23.0]


def test_sums_that_share_the_memory_of_a_caller_are_summed_in_float64(add_step):
    exact = 1.0 + 2.0**-40
    for memory in (torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)):
        totals = dict(zip("ab", memory, strict=True))
        for _ in range(2):
            add_step(totals, {n: torch.tensor(exact, dtype=torch.float64) for n in "ab"})
        assert [totals[name].tolist() for name in "ab"] == [[2 * exact]] * 2


def test_the_loss_that_was_handed_over_is_never_changed(add_step):
    totals, loss = {}, torch.tensor([1.0])
    for _ in range(3):
        add_step(totals, {"a": loss})
    assert loss.tolist() == [1.0]
    assert totals["a"].tolist() == [3.0]


def test_a_loss_with_a_graph_keeps_none(add_step):
    totals = {}
    add_step(totals, {"a": torch.tensor(1.0, requires_grad=True) * 2})
    assert not totals["a"].requires_grad


def test_a_key_that_comes_later(make_state, log_step, printed_line):
    totals, state = {}, make_state(step=4)
    log_step(state, {"a": torch.tensor(1.0)}, totals)
    state.train_state.step = 5
    log_step(state, {"a": torch.tensor(1.0), "b": torch.tensor(5.0)}, totals)
    assert " a: 1.000000E+00 | b: 2.500000E+00 |" in printed_line()


@pytest.mark.parametrize(
    ("loss", "is_nan"), [(1.0, 0), (math.nan, 1), (math.inf, 1), (-math.inf, 1)]
)
def test_nan_counts_on_skipped_steps_only(loss, is_nan, add_step):
    for skipped in (0, 1):
        totals = {}
        add_step(totals, {"fine": torch.tensor(1.0), "a": torch.tensor(loss)}, skipped)
        assert [totals[key] for key in COUNTERS] == [1 - skipped, skipped, is_nan * skipped]
        assert ("a" in totals) is not bool(skipped)


def test_a_skipped_step_reads_all_losses_in_one_transfer(monkeypatch, add_step):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(1), tolist(t))[1])
    add_step({}, {f"loss {i}": torch.tensor(float(i)) for i in range(12)}, 1)
    assert len(reads) == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(-1000, 1000).map(float), st.just(math.nan)), st.booleans()),
        min_size=1,
    )
)
def test_averages_and_counts_of_any_history(make_state, log_step, history):
    state, totals, out = make_state(log_interval=len(history)), {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for step, (loss, skipped) in enumerate(history, start=1):
            state.train_state.step = step
            assert out.getvalue() == ""
            log_step(state, {"a": torch.tensor(loss)}, totals, skipped=int(skipped))
    advanced = [loss for loss, skipped in history if not skipped]
    skipped_losses = [loss for loss, skipped in history if skipped]
    counts = re.findall(r"number of \w+ iterations: +(\d+) \|", out.getvalue())
    assert [int(count) for count in counts] == [
        len(skipped_losses),
        sum(map(math.isnan, skipped_losses)),
    ]
    averages = [float(number) for number in re.findall(r" a: (\S+) \|", out.getvalue())]
    expected = [sum(advanced) / len(advanced)] if advanced else []
    assert averages == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert [totals[key] for key in COUNTERS] == [0, 0, 0]
    assert "a" not in totals or totals["a"].tolist() == [0.0]
    assert ("a" in totals) is bool(advanced)


def test_sums_of_another_kind_are_taken_up(make_state, log_step, printed_line):
    totals, losses = {"a": 2.0, "b": torch.tensor(3.0)}, {"a": torch.tensor(1.0)}
    state = make_state(step=4)
    log_step(state, losses | {"b": torch.tensor(1.0)}, totals)
    assert totals["a"].tolist() == [3.0]
    assert totals["b"].tolist() == [4.0]
    state.train_state.step = 5
    log_step(state, losses, totals)
    assert " a: 2.000000E+00 | b: 2.000000E+00 |" in printed_line()
    assert totals["a"].tolist() == totals["b"].tolist() == [0.0]
