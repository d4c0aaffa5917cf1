"""Several processes: who prints, what is reduced, and how many collectives that takes."""

import contextlib
import io
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    MemorySink,
    MoEMetricsTracker,
    TrainingConfig,
    TrainState,
    training_log,
)
from rank_testing import run_ranks

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "barrier")


@contextlib.contextmanager
def counted_collectives():
    counts: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name):
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def make_state(**logger):
    config = ConfigContainer(
        logger=LoggerConfig(
            **{"log_interval": 1, "tensorboard_log_interval": 1, "console_format": "megatron"}
            | logger
        ),
        train=TrainingConfig(micro_batch_size=1, train_iters=10),
    )
    is_last = dist.get_rank() == dist.get_world_size() - 1
    sinks = [MemorySink()] if is_last else []
    return GlobalState(config, train_state=TrainState(step=1), extra_sinks=sinks)


def log_step(state, losses=None, totals=None, lr=1e-4, groups=None, **options):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), counted_collectives() as counts:
        training_log(
            losses or {"lm loss": torch.tensor(2.5)},
            {} if totals is None else totals,
            lr, None, 1.0, False, 0, None, None, None,
            state.cfg, state, None, options.get("model"), pg_collection=groups,
        )  # fmt: skip
    scalars = state.extra_sinks[0].steps if state.extra_sinks else None
    return out.getvalue(), counts, scalars


def learning_rate_is_none_on_rank_0():
    rates = [None, 1e-4]
    return log_step(
        make_state(), lr=rates[dist.get_rank()], groups=SimpleNamespace(mp=dist.group.WORLD)
    )


def test_largest_learning_rate_is_shown_once_by_the_last_rank():
    (out_0, counts_0, _), (out_1, counts_1, scalars) = run_ranks(learning_rate_is_none_on_rank_0, 2)
    assert out_0 == ""
    assert out_1.count("\n") == 1
    assert " learning rate: 1.000000E-04 |" in out_1
    assert scalars[1]["learning-rate"] == 1e-4
    assert counts_0 == counts_1 == {"all_reduce": 1}


def memory_differs():
    from mcore.observe.training_log import log

    reports = [{"peak": 1.0, "retries": 3}, {"peak": 2.0, "retries": 1}]
    log.report_memory = lambda keys: reports[dist.get_rank()]
    state = make_state(log_memory_to_tensorboard=True)
    return log_step(state, groups=SimpleNamespace(pp=dist.group.WORLD))


def test_memory_is_the_most_over_the_pipeline_and_counters_stay_ints():
    _, (_, counts, scalars) = run_ranks(memory_differs, 2)
    assert scalars[1]["memory/peak"] == 2.0
    assert scalars[1]["memory/retries"] == 3
    assert type(scalars[1]["memory/retries"]) is int
    assert counts == {"all_reduce": 1}


def timers_differ():
    import logging

    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("mcore.observe.timers")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    state = make_state(timing_log_level=1, log_timers_to_tensorboard=True)
    state.timers("forward-backward", log_level=1).set_elapsed([4.0, 6.0][dist.get_rank()])
    totals = {"advanced iterations": 3, "skipped iterations": 0, "nan iterations": 0}
    _, counts, scalars = log_step(state, totals=totals)
    return counts, scalars, texts


def test_timers_take_one_gather_for_trackers_and_console():
    (counts_0, _, texts_0), (counts_1, scalars, texts_1) = run_ranks(timers_differ, 2)
    assert scalars[1]["forward-backward-time"] == 6.0 / 4
    assert texts_0 == []
    assert texts_1 == [
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (1000.00, 1500.00)"
    ]
    assert counts_0 == counts_1
    assert sum(counts_0.values()) == 1


def interval_timer_runs():
    state = make_state()
    state.timers("interval-time", log_level=0).start()
    time.sleep(0.05 if dist.get_rank() == 0 else 0.3)
    out, counts, _ = log_step(state)
    return out, counts


def test_the_interval_ends_when_all_ranks_are_there():
    (_, counts_0), (out, counts_1) = run_ranks(interval_timer_runs, 2)
    assert counts_0 == counts_1 == {"barrier": 1}
    assert float(out.split("elapsed time per iteration (ms): ")[1].split()[0]) >= 300.0


def two_chunks_with_gradients():
    chunks = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    for chunk, gradient in zip(chunks, (3.0, 4.0), strict=True):
        chunk.weight.grad = torch.full((1, 1), gradient)
    state = make_state(log_l2_norm_grad_to_tensorboard=True)
    return log_step(state, model=chunks)


def test_gradient_norms_of_two_chunks_without_a_collective():
    (_, counts, none), (_, _, scalars) = run_ranks(two_chunks_with_gradients, 2)
    assert counts == {}
    assert none is None
    assert scalars[1]["l2_norm/grad/weight"] == 3.0
    assert scalars[1]["l2_norm/grad/chunk1.weight"] == 4.0
    assert scalars[1]["l2_norm/grad/global"] == 5.0


def first_stage_has_the_experts():
    state = make_state(log_interval=2, tensorboard_log_interval=2)
    state.cfg.model = SimpleNamespace(
        num_moe_experts=2,
        num_layers=2,
        moe_router_load_balancing_type=["aux_loss"],
        moe_layer_freq=[1, 0],
    )
    state.moe_metrics = MoEMetricsTracker()
    totals = {}
    for step in (1, 2):
        if dist.get_rank() == 0:
            state.moe_metrics.record("load_balancing_loss", torch.tensor(float(step)), 1, 2)
        state.train_state.step = step
        out, counts, scalars = log_step(
            state, totals=totals, groups=SimpleNamespace(pp=dist.group.WORLD)
        )
        if step == 1:
            assert counts == {}, counts
    return out, counts, scalars


def test_the_last_stage_shows_router_losses_of_the_first():
    (_, counts_0, _), (out, counts_1, scalars) = run_ranks(first_stage_has_the_experts, 2)
    assert counts_0 == counts_1 == {"all_reduce": 1}
    assert scalars[2]["load_balancing_loss"] == 1.5
    assert " load_balancing_loss: 1.500000E+00 |" in out


def nothing_is_configured():
    return log_step(make_state())


def test_a_line_without_groups_takes_no_collective():
    (out_0, counts_0, _), (out_1, counts_1, _) = run_ranks(nothing_is_configured, 2)
    assert counts_0 == counts_1 == {}
    assert (out_0 == "", out_1.count("\n")) == (True, 1)


def throughput_is_known():
    state = make_state(log_throughput=True)
    state.train_state.floating_point_operations_so_far = 8e12
    state.timers("interval-time", log_level=0).set_elapsed(2.0)
    return log_step(state)[0]


def test_rank_0_prints_the_step_time_and_the_last_rank_the_line():
    out_0, out_1 = run_ranks(throughput_is_known, 2)
    assert out_0 == "Step Time : 2.00s GPU utilization: 2.0MODEL_TFLOP/s/GPU\n"
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in out_1
    assert "Step Time" not in out_1


def memory_of_data_parallel_ranks():
    out = io.StringIO()
    state = make_state()
    with contextlib.redirect_stdout(out):
        flag = training_log(
            {}, {}, 1e-4, None, 1.0, True, 0, None, None, None, state.cfg, state, None, None,
            pg_collection=SimpleNamespace(dp=dist.group.WORLD),
        )  # fmt: skip
    return flag, out.getvalue()


def test_memory_is_printed_by_the_first_data_parallel_rank():
    (flag_0, out_0), (flag_1, out_1) = run_ranks(memory_of_data_parallel_ranks, 2)
    assert flag_0 is flag_1 is True
    assert out_0.startswith("[Rank 0] (after 1 iterations) memory (GB) | ")
    assert "memory" not in out_1
