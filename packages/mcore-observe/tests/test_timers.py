import logging
from unittest import mock

import pytest
import torch.distributed as dist

from mcore.observe import Timers
from mcore.observe.timers import gather_seconds
from rank_testing import run_ranks


def test_levels():
    timers = Timers(1, "max")
    assert timers("a", log_level=0) is timers("a")
    assert timers("a") is timers.find("a")
    timers("b", log_level=2).start()
    assert timers.find("b") is None
    assert timers("c") is timers("b")  # a new one without a level has level 2
    with pytest.raises(ValueError, match="'a' was made with level 0, not 1"):
        timers("a", log_level=1)
    with pytest.raises(ValueError, match="'d' has level 3"):
        timers("d", log_level=3)


def test_level_minus_one_disables_all():
    Timers(-1, "max")("a", log_level=0).start()
    with pytest.raises(RuntimeError, match="disabled"):
        Timers(-1, "max")("a", log_level=0).elapsed()


def test_unknown_option():
    with pytest.raises(ValueError, match="log_option is 'mean'"):
        Timers(0, "mean")


def test_text_of_one_process_reads_and_resets():
    timers = Timers(0, "minmax")
    timers("forward-backward", log_level=0).set_elapsed(0.004)
    timers("never", log_level=0)
    text = timers.get_all_timers_string(normalizer=2.0, reset=False)
    assert text == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (2.00, 2.00)"
    )
    assert timers.get_all_timers_string(["forward-backward", "unknown"]) is not None
    assert timers.get_all_timers_string() is None


def test_normalizer_must_be_positive():
    with pytest.raises(ValueError, match="normalizer is 0"):
        Timers(0, "max").log(["a"], normalizer=0)


def test_each_tracker_gets_its_call_shape():
    timers = Timers(0, "max")
    timers("a", log_level=0).set_elapsed(3.0)
    timers("b@c", log_level=0).set_elapsed(1.0)
    names = ["a", "b@c", "unknown"]
    tb, wandb, mlflow, comet = (mock.Mock() for _ in range(4))
    timers.write(names, tb, 5, 2.0, False)
    timers.write_to_wandb(names, wandb, 5, 2.0, False)
    timers.write_to_mlflow(names, mlflow, 5, 2.0, False)
    timers.write_to_comet(names, comet, 5, 2.0, True)
    assert tb.add_scalar.mock_calls == [mock.call("a-time", 1.5, 5), mock.call("b@c-time", 0.5, 5)]
    assert wandb.log.mock_calls == [mock.call({"a-time": 1.5, "b@c-time": 0.5}, 5)]
    sanitized = {"a-time": 1.5, "b_at_c-time": 0.5}
    assert mlflow.log_metrics.mock_calls == [mock.call(sanitized, step=5)]
    assert comet.log_metrics.mock_calls == [mock.call({"a-time": 1.5, "b@c-time": 0.5}, step=5)]
    timers.write_to_comet(names, comet, 6)  # nothing ran since: nothing is sent
    assert comet.log_metrics.call_count == 1


def gather_and_log(option):
    calls = []
    originals = {n: getattr(dist, n) for n in ("all_gather_single", "all_gather_into_tensor")
                 if hasattr(dist, n)}  # fmt: skip
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _o=original, **k: (calls.append(1), _o(*a, **k))[1])
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append((record.levelname, record.getMessage()))
    logging.getLogger("mcore.observe.timers").addHandler(handler)
    logging.getLogger("mcore.observe.timers").setLevel(logging.INFO)
    rank = dist.get_rank()
    timers = Timers(0, option)
    timers("both", log_level=0).set_elapsed([0.001, 0.002][rank])
    if rank == 1:
        timers("one", log_level=0).set_elapsed(0.003)
    timers.log(["both", "one", "none"], reset=False)
    timers.log(["both"], rank=0, normalizer=2.0, reset=False, barrier=True)
    timers.log([])
    rows = gather_seconds([float(rank), 1.0]).tolist()
    return texts, len(calls), rows


DOTS_BOTH = "both " + "." * 43
DOTS_ONE = "one " + "." * 44


@pytest.mark.parametrize(
    ("option", "first", "second"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            f"    {DOTS_BOTH}: (1.00, 2.00)\n    {DOTS_ONE}: (3.00, 3.00)",
            f"(min, max) time across ranks (ms):\n    {DOTS_BOTH}: (0.50, 1.00)",
        ),
        (
            "max",
            f"max time across ranks (ms):\n    {DOTS_BOTH}: 2.00\n    {DOTS_ONE}: 3.00",
            f"max time across ranks (ms):\n    {DOTS_BOTH}: 1.00",
        ),
        (
            "all",
            "times across ranks (ms):\n  both:\n     rank  0: 1.00\n     rank  1: 2.00\n"
            "  one:\n     rank  1: 3.00",
            "times across ranks (ms):\n  both:\n     rank  0: 0.50\n     rank  1: 1.00",
        ),
    ],
)
def test_times_of_two_ranks_take_one_gather_a_call_and_are_logged_by_one(option, first, second):
    (texts_0, calls_0, rows_0), (texts_1, calls_1, rows_1) = run_ranks(gather_and_log, 2, option)
    assert texts_1 == [("INFO", first)]
    assert texts_0 == [("INFO", second)]
    assert calls_0 == calls_1 == 3  # two logs, one direct gather, none for no names
    assert rows_0 == rows_1 == [[0.0, 1.0], [1.0, 1.0]]
