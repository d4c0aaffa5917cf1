import math
from datetime import datetime

from mcore.observe.steplog.console_line import ConsoleFacts, console_line, memory_line

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_all_fields_byte_for_byte():
    facts = ConsoleFacts(
        iteration=5,
        train_iters=1000,
        consumed_samples=640,
        skipped_samples=7,
        ms_per_iteration=100.0,
        tflops_per_device=2.0,
        joules_per_iteration=12.5,
        watts=125.0,
        learning_rate=1e-4,
        batch_size=64,
        losses={"lm loss": 2.5},
        loss_scale=1024.0,
        grad_norm=2.5,
        num_zeros=0,
        params_norm=15.2,
        max_attention_logit=3.25,
        skipped_iterations=0,
        nan_iterations=0,
    )
    assert console_line(facts, NOW) == (
        " [2026-01-02 03:04:05] iteration        5/    1000 | consumed samples:          640 |"
        " skipped samples:            7 | elapsed time per iteration (ms): 100.0 |"
        " throughput per GPU (TFLOP/s/GPU): 2.0 | energy per GPU (J/iter/GPU): 12.5 |"
        " power per GPU (W/GPU): 125.0 | learning rate: 1.000000E-04 | global batch size:    64 |"
        " lm loss: 2.500000E+00 | loss scale: 1024.0 | grad norm: 2.500 | num zeros: 0 |"
        " params norm: 15.200 | max attention logit: 3.250 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_optional_fields_are_left_out_and_odd_numbers_are_shown():
    facts = ConsoleFacts(
        iteration=123456789,
        train_iters=None,
        consumed_samples=0,
        skipped_samples=0,
        ms_per_iteration=math.nan,
        batch_size=100000,
        losses={"a": -0.5, "b": math.nan, "c": math.inf},
        loss_scale=0.5,
        skipped_iterations=3,
        nan_iterations=12345,
        extra=" routed: 1.00 |",
    )
    assert console_line(facts, NOW) == (
        " [2026-01-02 03:04:05] iteration 123456789 | consumed samples:            0 |"
        " elapsed time per iteration (ms): nan | global batch size: 100000 |"
        " a: -5.000000E-01 | b: NAN | c: INF | loss scale: 0.5 |"
        " number of skipped iterations:   3 | number of nan iterations: 12345 | routed: 1.00 |"
    )


def test_memory_line():
    report = {"mem-allocated-gigabytes": 1.2346, "mem-alloc-retires": 2}
    assert memory_line(7, 2, report) == (
        "[Rank 7] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 1.2346 |"
        " mem-alloc-retires: 2"
    )
