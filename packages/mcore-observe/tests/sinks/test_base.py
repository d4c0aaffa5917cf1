import math

import pytest
import torch

from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks import GuardedSink, MemorySink
from mcore.observe.sinks.scalars import plain_numbers


@pytest.fixture(autouse=True)
def nobody_was_warned():
    warn_once.cache_clear()


def test_numbers_of_every_kind_in_their_order():
    numpy = pytest.importorskip("numpy")
    found = plain_numbers(
        {
            "tensor": torch.tensor(2.5),
            "int": 3,
            "numpy": numpy.float32(0.5),
            "numpy int": numpy.int64(7),
            "bool": True,
            "inf": -math.inf,
            "none": None,
            "one element": torch.ones(1, 1, dtype=torch.int64),
        }
    )
    assert list(found.items()) == [
        ("tensor", 2.5),
        ("int", 3),
        ("numpy", 0.5),
        ("numpy int", 7),
        ("bool", 1),
        ("inf", -math.inf),
        ("one element", 1),
    ]
    assert {type(value) for value in found.values()} == {int, float}


def test_the_given_metrics_are_never_handed_on():
    metrics = {"a": 1.0}
    assert plain_numbers(metrics) == metrics
    assert plain_numbers(metrics) is not metrics


def test_all_tensors_are_read_in_one_transfer(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(1), tolist(t))[1])
    plain_numbers({f"loss {i}": torch.tensor(float(i)) for i in range(12)})
    assert len(reads) == 1


def test_other_values_than_numbers_are_one_warning_for_each_name(caplog):
    for _ in range(3):
        assert plain_numbers({"a": "x", "b": torch.ones(2), "c": 1j, "d": 1.0}) == {"d": 1.0}
    assert [r.getMessage().split(" is no")[0] for r in caplog.records] == ["'a'", "'b'", "'c'"]


def test_a_guard_counts_failures_in_a_row_only(caplog):
    outcomes = iter([OSError("a"), None] + [OSError("b")] * 9 + [None] + [ValueError("c")] * 12)
    tried = []

    class Flaky(MemorySink):
        def log(self, metrics, step):
            tried.append(step)
            outcome = next(outcomes)
            if outcome is not None:
                raise outcome

    sink = GuardedSink("flaky", Flaky())
    for step in range(30):
        sink.log({"a": 1.0}, step)
    assert tried == list(range(22))
    assert not sink.is_on
    assert [(r.levelname, r.getMessage().split(": ")[1:]) for r in caplog.records] == [
        ("WARNING", ["OSError", "a"]),
        ("WARNING", ["ValueError", "c"]),
        ("ERROR", []),
    ]


def test_a_guard_sends_nothing_for_no_metrics_and_lets_interrupts_through():
    class Interrupted(MemorySink):
        def log(self, metrics, step):
            raise KeyboardInterrupt

    sink = GuardedSink("interrupted", Interrupted())
    sink.log({}, 1)
    with pytest.raises(KeyboardInterrupt):
        sink.log({"a": 1.0}, 1)
