"""One process: what training_log sums, prints and sends."""

import json
import logging
import math
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    JsonlSink,
    LoggerConfig,
    MemorySink,
    MoEMetricsTracker,
    MTPMetricsTracker,
    ProfilingConfig,
    TrainingConfig,
    TrainState,
    training_log,
)
from mcore.observe.training_log import expert_report

LINE = re.compile(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\](?P<fields> iteration.*)$", re.MULTILINE)


class Recorder:
    """Stands for a client of a tracker: keeps the calls as (method, arguments)."""

    def __init__(self, fail_with: Exception | None = None) -> None:
        self.calls: list[tuple] = []
        self.fail_with = fail_with

    def _record(self, *call):
        self.calls.append(call)
        if self.fail_with is not None:
            raise self.fail_with

    def add_scalar(self, name, value, step):
        self._record("add_scalar", name, value, step)

    def log(self, metrics, step):
        self._record("log", metrics, step)

    def log_metrics(self, metrics, *, step):
        self._record("log_metrics", metrics, step)

    def scalars(self):
        return {(name, step): value for _, name, value, step in self.calls}


def make_state(*, step=5, sinks=(), train=None, model=None, optimizer=None, **logger):
    config = ConfigContainer(
        logger=LoggerConfig(**{"log_interval": 5, "tensorboard_log_interval": 5} | logger),
        train=train or TrainingConfig(micro_batch_size=2, global_batch_size=64, train_iters=1000),
        model=model,
        optimizer=optimizer,
        data_parallel_size=4,
    )
    train_state = TrainState(step=step, consumed_train_samples=128 * step)
    return GlobalState(config, train_state=train_state, extra_sinks=sinks)


def call(state, losses=None, totals=None, *, lr=1e-4, memory=False, skipped=0, **options):
    arguments = {
        "decoupled_learning_rate": None,
        "loss_scale": 1.0,
        "grad_norm": None,
        "params_norm": None,
        "num_zeros_in_grad": None,
        "history_wct": None,
        "model": None,
    } | options
    return training_log(
        losses if losses is not None else {"lm loss": torch.tensor(2.5)},
        totals if totals is not None else {},
        learning_rate=lr,
        report_memory_flag=memory,
        skipped_iter=skipped,
        config=state.cfg,
        global_state=state,
        **arguments,
    )


def fields(text):
    found = LINE.findall(text)
    assert len(found) == 1, text
    return found[0]


# --- accumulation -------------------------------------------------------------------------------


def test_the_only_output_of_five_steps_is_the_exact_line_which_resets_the_sums(capsys):
    state = make_state(step=0)
    state.timers("interval-time", log_level=0).set_elapsed(0.5)
    totals = {}
    for step in range(1, 6):
        state.train_state.step = step
        state.train_state.consumed_train_samples = 128 * step
        call(state, totals=totals)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert fields(out) == (
        " iteration        5/    1000 | consumed samples:          640 |"
        " elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-04 |"
        " global batch size:    64 | lm loss: 2.500000E+00 | loss scale: 1.0 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert totals["lm loss"].tolist() == [0.0]
    assert [totals[f"{kind} iterations"] for kind in ("advanced", "skipped", "nan")] == [0, 0, 0]


def test_no_line_between_intervals(capsys):
    totals = {}
    state = make_state(step=101)
    call(state, {"lm loss": torch.tensor(2.5)}, totals)
    assert capsys.readouterr().out == ""
    assert totals == {
        "advanced iterations": 1,
        "skipped iterations": 0,
        "nan iterations": 0,
        "lm loss": torch.tensor([2.5]),
    }


def test_skipped_nan_step_counts_and_adds_no_loss():
    totals = {}
    call(make_state(step=1), {"lm loss": torch.tensor(math.nan)}, totals, skipped=1)
    assert totals == {"advanced iterations": 0, "skipped iterations": 1, "nan iterations": 1}


def test_averages_are_over_advanced_steps_and_the_line_counts_the_others(capsys):
    state, totals = make_state(step=0), {}
    steps = [(1.0, 0), (math.nan, 1), (2.0, 0), (7.0, 1), (6.0, 0)]
    for step, (loss, skipped) in enumerate(steps, start=1):
        state.train_state.step = step
        call(state, {"lm loss": torch.tensor([loss])}, totals, skipped=skipped)
    line = fields(capsys.readouterr().out)
    assert " lm loss: 3.000000E+00 |" in line
    assert " number of skipped iterations:   2 | number of nan iterations:   1 |" in line


def test_negative_and_nan_averages_are_shown(capsys):
    call(make_state(), {"lm loss": torch.tensor(-0.5)})
    assert " lm loss: -5.000000E-01 |" in fields(capsys.readouterr().out)
    call(make_state(), {"lm loss": torch.tensor(math.nan)})
    assert " lm loss: NAN |" in fields(capsys.readouterr().out)


def test_unknown_learning_rate_and_length_leave_their_fields_out(capsys):
    call(make_state(train=TrainingConfig(micro_batch_size=1)), lr=None)
    line = fields(capsys.readouterr().out)
    assert line.startswith(" iteration        5 | consumed samples:")
    assert "learning rate" not in line


def test_every_kind_of_number_is_accepted(capsys):
    numpy = pytest.importorskip("numpy")
    call(
        make_state(),
        lr=numpy.float32(0.5),
        loss_scale=torch.tensor([1024.0]),
        grad_norm=torch.tensor(2.5, dtype=torch.bfloat16),
        params_norm=numpy.float64(15.2),
        num_zeros_in_grad=torch.tensor(3),
        log_max_attention_logit=3.25,
    )
    line = fields(capsys.readouterr().out)
    assert " learning rate: 5.000000E-01 |" in line
    assert (
        " loss scale: 1024.0 | grad norm: 2.500 | num zeros: 3 | params norm: 15.200 |"
        " max attention logit: 3.250 |" in line
    )


def test_a_loss_with_several_elements_is_refused():
    with pytest.raises(ValueError, match=r"'lm loss' has shape \(2,\)"):
        call(make_state(), {"lm loss": torch.ones(2)})


def test_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="logging interval is 0"):
        call(make_state(log_interval=0))


def test_skip_train_metrics_log_does_nothing(capsys):
    totals = {}
    assert call(make_state(skip_train_metrics_log=True), totals=totals, memory=True) is True
    assert totals == {}
    assert capsys.readouterr().out == ""


def test_last_four_arguments_have_their_documented_defaults():
    import inspect

    parameters = inspect.signature(training_log).parameters
    tail = {name: p.default for name, p in list(parameters.items())[-4:]}
    assert tail == {
        "pg_collection": None,
        "log_max_attention_logit": None,
        "loaded_iteration": 0,
        "seq_length": None,
    }


# --- throughput ---------------------------------------------------------------------------------


@pytest.fixture
def world_of_eight():
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield
    dist.destroy_process_group()


def test_throughput_of_eight_ranks(world_of_eight, capsys):
    sink = MemorySink()
    state = make_state(
        sinks=[sink],
        log_throughput=True,
        log_throughput_to_tensorboard=True,
        log_timers_to_tensorboard=True,
    )
    state._flops_at_last_log = 100e12
    state.train_state.floating_point_operations_so_far = 108e12
    state.timers("interval-time", log_level=0).set_elapsed(0.5)
    call(state)
    assert sink.steps[5]["throughput/tflops/device"] == pytest.approx(2.0)
    assert sink.steps[5]["throughput/tflops"] == pytest.approx(16.0)
    assert sink.steps[5]["iteration-time"] == pytest.approx(0.5)
    assert state._flops_at_last_log == 108e12
    out = capsys.readouterr().out
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in out
    assert "Step Time" not in out  # rank 0 prints that one


def test_rank_0_prints_the_step_time_before_the_line(capsys):
    state = make_state(log_throughput=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers("interval-time", log_level=0).set_elapsed(1.5)
    call(state)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Step Time : 1.50s GPU utilization: 2.0MODEL_TFLOP/s/GPU"
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in second


def test_a_resumed_run_has_no_figure_for_its_first_interval(capsys):
    state = make_state(step=905, log_throughput=True)
    state.train_state.floating_point_operations_so_far = 900e12
    timer = state.timers("interval-time", log_level=0)
    timer.set_elapsed(0.5)
    call(state, loaded_iteration=900)
    assert "throughput" not in capsys.readouterr().out
    assert state._flops_at_last_log == 900e12
    state.train_state.step = 910
    state.train_state.floating_point_operations_so_far = 902e12
    timer.set_elapsed(0.5)
    call(state, loaded_iteration=900)
    assert " throughput per GPU (TFLOP/s/GPU): 4.0 |" in capsys.readouterr().out


def test_no_time_means_no_throughput(capsys):
    state = make_state(log_throughput=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers = _foreign_timers(elapsed=0.0)
    call(state)
    line = fields(capsys.readouterr().out)
    assert " elapsed time per iteration (ms): 0.0 |" in line
    assert "throughput" not in line


def test_without_a_running_timer_the_time_between_calls_counts(capsys, monkeypatch):
    now = iter([10.0, 10.4, 10.4, 10.8])  # first call; second call's line; its new anchor; unused
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    state, totals = make_state(step=1, log_interval=2, tensorboard_log_interval=2), {}
    call(state, totals=totals)
    state.train_state.step = 2
    call(state, totals=totals)
    assert " elapsed time per iteration (ms): 400.0 |" in fields(capsys.readouterr().out)


def test_a_time_that_nobody_measured_is_nan(capsys):
    call(make_state())
    assert " elapsed time per iteration (ms): nan |" in fields(capsys.readouterr().out)


def test_energy_of_a_gpu_for_a_step(world_of_eight, capsys):
    sink = MemorySink()
    state, totals = make_state(sinks=[sink]), {"advanced iterations": 9, "skipped iterations": 0}
    state.energy_monitor = SimpleNamespace(lap=lambda: 1000.0, shutdown=lambda: None)
    state.timers("interval-time", log_level=0).set_elapsed(1.0)
    call(state, totals=totals)
    # 1000 J over 10 steps and 8 GPUs, at 0.1 s a step.
    assert sink.steps[5]["iter-energy/gpu"] == pytest.approx(12.5)
    assert sink.steps[5]["power/gpu"] == pytest.approx(125.0)
    line = fields(capsys.readouterr().out)
    assert " energy per GPU (J/iter/GPU): 12.5 | power per GPU (W/GPU): 125.0 |" in line


def test_a_monitor_that_is_made_when_it_is_read_counts_from_the_first_step(monkeypatch):
    readings = iter([1000, 4000])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("mcore.observe.energy._nvml_reader", lambda: lambda: next(readings))
    sink = MemorySink()
    state, totals = make_state(step=1, sinks=[sink], log_energy=True), {}
    for step in range(1, 6):
        state.train_state.step = step
        call(state, totals=totals)
    assert sink.steps[5]["iter-energy/gpu"] == pytest.approx(3.0 / 5)


def test_unknown_energy_is_left_out(capsys):
    state = make_state()
    state.energy_monitor = SimpleNamespace(lap=lambda: math.nan, shutdown=lambda: None)
    call(state)
    assert "energy" not in capsys.readouterr().out


# --- scalars ------------------------------------------------------------------------------------


def all_trackers(state):
    trackers = {name: Recorder() for name in ("tensorboard", "wandb", "mlflow", "comet")}
    for name, recorder in trackers.items():
        setattr(state, f"{name}_logger", recorder)
    return trackers


def test_one_call_for_each_tracker_with_the_documented_shapes():
    state = make_state(log_interval=100)
    state.train_state.skipped_train_samples = 7
    trackers = all_trackers(state)
    call(state, grad_norm=2.0)
    expected = {
        "samples vs steps": 640,
        "learning-rate": 1e-4,
        "skipped-train-samples": 7,
        "batch-size": 64,
        "lm loss": 2.5,
        "loss-scale": 1.0,
        "grad-norm": 2.0,
    }
    assert trackers["wandb"].calls == [("log", expected, 5)]
    assert trackers["mlflow"].calls == [("log_metrics", expected, 5)]
    assert trackers["comet"].calls == [("log_metrics", expected, 5)]


def test_tensorboard_also_gets_scalars_over_samples():
    state = make_state(log_interval=100, log_world_size_to_tensorboard=True)
    state.train_state.skipped_train_samples = 7
    tensorboard = all_trackers(state)["tensorboard"]
    call(state, grad_norm=2.0, num_zeros_in_grad=3, params_norm=4.0, log_max_attention_logit=5.0)
    pairs = {
        "learning-rate": 1e-4,
        "batch-size": 64,
        "lm loss": 2.5,
        "loss-scale": 1.0,
        "world-size": 1,
        "grad-norm": 2.0,
        "num-zeros": 3,
        "params-norm": 4.0,
        "max-attention-logit": 5.0,
    }
    expected = {(name, 5): value for name, value in pairs.items()}
    expected |= {(f"{name} vs samples", 640): value for name, value in pairs.items()}
    assert tensorboard.scalars() == expected | {("skipped-train-samples", 5): 7}


def test_mlflow_gets_the_name_of_its_own_for_tflops_per_device():
    state = make_state(log_throughput_to_tensorboard=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers("interval-time", log_level=0).set_elapsed(1.5)
    trackers = all_trackers(state)
    call(state)
    (mlflow,) = trackers["mlflow"].calls
    assert mlflow[1]["throughput/tflops_per_device"] == pytest.approx(2.0)
    assert "throughput/tflops_device" not in mlflow[1]
    assert trackers["wandb"].calls[0][1]["throughput/tflops/device"] == pytest.approx(2.0)


def test_the_step_loss_is_sent_and_not_the_average():
    sink = MemorySink()
    state, totals = make_state(step=4, sinks=[sink], tensorboard_log_interval=1), {}
    call(state, {"lm loss": torch.tensor(4.0)}, totals)
    state.train_state.step = 5
    call(state, {"lm loss": torch.tensor(2.0)}, totals)
    assert [sink.steps[step]["lm loss"] for step in (4, 5)] == [4.0, 2.0]


def test_comet_alone_gets_one_call_without_losses():
    state = make_state()
    state.comet_logger = Recorder()
    call(state, {})
    ((method, metrics, step),) = state.comet_logger.calls
    assert (method, step) == ("log_metrics", 5)
    assert {"learning-rate", "batch-size"} <= set(metrics)


def test_decoupled_learning_rate_only_where_it_is_configured_and_known():
    sink = MemorySink()
    call(make_state(sinks=[sink]), decoupled_learning_rate=0.25)
    call(make_state(step=10, sinks=[sink], optimizer=SimpleNamespace(decoupled_lr=1)))
    state = make_state(step=15, sinks=[sink], optimizer=SimpleNamespace(decoupled_lr=1))
    call(state, decoupled_learning_rate=0.25)
    names = "decoupled-learning-rate"
    assert [sink.steps[step].get(names) for step in (5, 10, 15)] == [None, None, 0.25]


def test_throughput_runtime_memory_and_gradient_norms_reach_the_sinks(monkeypatch):
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.grad = torch.tensor([[3.0]])
    sink = MemorySink()
    state = make_state(
        sinks=[sink],
        step=5,
        throughput_window_size=2,
        runtime_time_unit="seconds",
        **{
            f"log_{what}_to_tensorboard": True
            for what in ("throughput", "runtime", "memory", "l2_norm_grad")
        },
    )
    state.start_time = 100.0
    monkeypatch.setattr("time.time", lambda: 110.0)
    call(state, model=[layer], history_wct=[1.0, 3.0], seq_length=10, loaded_iteration=3)
    got = sink.steps[5]
    assert got["throughput/batches_per_sec"] == 0.5
    assert got["throughput/tokens_per_sec"] == 0.5 * 64 * 10
    assert got["time/remaining_estimate"] == 10.0 / 2 * 995
    assert got["time/tokens"] == 640 * 10
    assert got["memory/mem-host-rss-gigabytes"] > 0
    assert got["l2_norm/grad/global"] == 3.0


def test_sequence_length_of_the_dataset_counts_unless_one_is_given():
    sink = MemorySink()
    state = make_state(sinks=[sink], log_runtime_to_tensorboard=True)
    state.cfg.dataset.seq_length = 3
    call(state)
    assert sink.steps[5]["time/tokens"] == 640 * 3
    state.train_state.step = 10
    call(state, seq_length=2)
    assert sink.steps[10]["time/tokens"] == 640 * 2


def test_gradient_norms_need_the_model():
    with pytest.raises(ValueError, match="give the model, not None"):
        call(make_state(log_l2_norm_grad_to_tensorboard=True))


def test_trackers_and_console_have_intervals_of_their_own(capsys):
    sink = MemorySink()
    state, totals = make_state(step=0, sinks=[sink], tensorboard_log_interval=2, log_interval=3), {}
    for step in range(1, 7):
        state.train_state.step = step
        call(state, {"lm loss": torch.tensor(float(step))}, totals)
    assert sorted(sink.steps) == [2, 4, 6]
    lines = LINE.findall(capsys.readouterr().out)
    assert [re.search(r"lm loss: (\S+)", line)[1] for line in lines] == [
        "2.000000E+00",
        "5.000000E+00",
    ]


def test_one_failing_tracker_is_one_warning_and_the_others_get_everything(caplog):
    sink = MemorySink()
    state = make_state(sinks=[sink], tensorboard_log_interval=1, log_interval=100)
    state.comet_logger = Recorder(fail_with=OSError("no network"))
    for step in (1, 2, 3):
        state.train_state.step = step
        call(state)
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(records) == 1
    assert "Comet" in records[0].getMessage()
    assert sorted(sink.steps) == [1, 2, 3]


def test_a_tracker_that_fails_ten_times_in_a_row_is_switched_off(caplog):
    state = make_state(tensorboard_log_interval=1, log_interval=100)
    state.comet_logger = Recorder(fail_with=OSError("no network"))
    for step in range(1, 13):
        state.train_state.step = step
        call(state)
    assert len(state.comet_logger.calls) == 10
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"]


def test_jsonl_holds_what_the_trackers_got(tmp_path):
    path = tmp_path / "metrics.jsonl"
    state = make_state(sinks=[JsonlSink(path)], tensorboard_log_interval=1, log_interval=100)
    for step, loss in ((1, 2.5), (2, math.nan)):
        state.train_state.step = step
        call(state, {"lm loss": torch.tensor(loss)})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[-1]["step"] == step  # there at once, not only when the sink is closed
    assert [line["lm loss"] for line in lines] == [2.5, None]
    assert lines[0]["samples vs steps"] == 640
    assert lines[0]["batch-size"] == 64


def test_event_files_hold_the_documented_tags(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    state = make_state(step=0, tensorboard_dir=str(tmp_path), tensorboard_log_interval=1)
    for step in (1, 2):
        state.train_state.step = step
        state.train_state.consumed_train_samples = 64 * step
        call(state, {"lm loss": torch.tensor(2.0 * step)})
    state.close()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 2.0), (2, 4.0)]
    assert [(e.step, e.value) for e in events.Scalars("lm loss vs samples")] == [
        (64, 2.0),
        (128, 4.0),
    ]
    names = {"lm loss", "learning-rate", "batch-size", "loss-scale"}
    assert set(events.Tags()["scalars"]) == names | {f"{name} vs samples" for name in names}


@pytest.mark.slow
def test_mlflow_holds_every_metric_with_its_step_after_close(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    state = make_state(
        step=0,
        tensorboard_log_interval=1,
        mlflow_experiment="observe",
        mlflow_run_name="one",
        mlflow_tracking_uri=uri,
        comet_api_key="very secret",
    )
    for step in (1, 2):
        state.train_state.step = step
        call(state, {"lm loss": torch.tensor(2.0 * step), "acc@1": torch.tensor(math.nan)})
    run_id = state.mlflow_logger.run_id
    state.close()
    client = tracking.MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.train_iters"] == "1000"
    assert run.data.params["logger.comet_api_key"] == "***"
    history = {
        name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)]
        for name in ("lm loss", "batch-size", "learning-rate", "loss-scale", "samples vs steps")
    }
    assert history["lm loss"] == [(1, 2.0), (2, 4.0)]
    assert all([step for step, _ in values] == [1, 2] for values in history.values())
    nan_history = client.get_metric_history(run_id, "acc_at_1")
    assert [m.step for m in nan_history] == [1, 2]
    assert all(math.isnan(m.value) for m in nan_history)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "loaded", "still"), [(1, 0, True), (5, 0, False), (101, 100, True), (102, 100, False)]
)
def test_memory_is_reported_for_the_first_two_steps_of_a_process(step, loaded, still, capsys):
    state = make_state(step=step, log_interval=1)
    assert call(state, memory=True, loaded_iteration=loaded) is still
    line = capsys.readouterr().out.splitlines()[-1]
    number = r"\d+(\.\d+)?(e-\d+)?"
    assert re.fullmatch(
        rf"\[Rank 0\] \(after {step} iterations\) memory \(GB\) \| mem-host-rss-gigabytes: "
        rf"{number} \| mem-max-host-rss-gigabytes: {number}",
        line,
    )


def test_memory_is_not_reported_any_more(capsys):
    assert call(make_state(log_interval=1), memory=False) is False
    assert "memory" not in capsys.readouterr().out


def test_theoretical_memory_is_asked_for_before_the_measured_one():
    state, asked = make_state(), []
    state.theoretical_memory_fn = lambda config, microbatches: asked.append((config, microbatches))
    call(state, memory=True)
    assert asked == [(state.cfg, 8)]


def test_snapshot_at_the_profile_end_is_a_warning_without_cuda(caplog):
    from mcore.observe import memory_snapshot

    memory_snapshot._warn_no_cuda.cache_clear()
    state = make_state(step=12)
    state.cfg.profiling = ProfilingConfig(record_memory_history=True)
    with mock.patch("torch.cuda.is_available", return_value=False):
        call(state)
    assert "needs CUDA" in caplog.text


# --- experts ------------------------------------------------------------------------------------


def moe_model(**options):
    return SimpleNamespace(
        **{
            "num_moe_experts": 4,
            "num_layers": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_z_loss_coeff": 0.1,
            "mtp_num_layers": None,
        }
        | options
    )


def record_router(tracker, value):
    for layer in (1, 2):
        tracker.record("load_balancing_loss", torch.tensor(value), layer, 2)


def test_router_losses_reach_sinks_and_line(capsys):
    sink = MemorySink()
    state, totals = (
        make_state(step=4, sinks=[sink], tensorboard_log_interval=1, model=moe_model()),
        {},
    )
    state.moe_metrics = MoEMetricsTracker()
    for step, value in ((4, 8.0), (5, 16.0)):
        state.train_state.step = step
        record_router(state.moe_metrics, value)
        call(state, totals=totals)
    # Both layers have the same value, eight microbatches divide it.
    assert [sink.steps[step]["load_balancing_loss"] for step in (4, 5)] == [1.0, 2.0]
    assert [sink.steps[step]["z_loss"] for step in (4, 5)] == [0.0, 0.0]
    assert " load_balancing_loss: 1.500000E+00 | z_loss: 0.000000E+00 | loss scale" in fields(
        capsys.readouterr().out
    )


def test_router_losses_wait_for_a_step_that_logs_and_skipped_steps_do_not_count(capsys):
    sink = MemorySink()
    model = moe_model(moe_per_layer_logging=True)
    state, totals = make_state(step=0, sinks=[sink], model=model), {}
    state.moe_metrics = MoEMetricsTracker()
    for step, (value, skipped) in enumerate(
        [(8.0, 0), (80.0, 1), (16.0, 0), (math.nan, 1), (24.0, 0)], start=1
    ):
        state.train_state.step = step
        record_router(state.moe_metrics, value)
        call(state, totals=totals, skipped=skipped)
    assert sink.steps[5]["load_balancing_loss"] == pytest.approx((1 + 2 + 3) / 3)
    assert sink.steps[5]["moe/load_balancing_loss_layer_1"] == pytest.approx(2.0)
    assert " load_balancing_loss: 2.000000E+00 |" in fields(capsys.readouterr().out)


def test_metrics_of_experts_that_are_no_losses_are_shown_as_text(capsys):
    state = make_state(model=moe_model())
    state.moe_metrics = MoEMetricsTracker()
    with mock.patch.object(expert_report, "moe_metric_names", return_value=["load_ratio"]):
        state.moe_metrics.record("load_ratio", torch.tensor(20.0), 1, 2)
        call(state)
    assert fields(capsys.readouterr().out).endswith(
        " number of nan iterations:   0 | load_ratio: 1.25 |"
    )


def test_a_foreign_tracker_is_asked_at_every_step_and_a_skipped_one_adds_nothing():
    asked = []

    class Foreign:
        def report(self, *, writer, total_loss_dict, iteration, loss_scale, **options):
            writer.add_scalar("z_loss", 0.5, iteration)
            asked.append((iteration, loss_scale, total_loss_dict is None))
            return " routed: 1.00 |"

    sink = MemorySink()
    state = make_state(step=4, sinks=[sink], model=moe_model())
    state.moe_metrics = Foreign()
    call(state, skipped=1)
    state.train_state.step = 5
    call(state)
    assert asked == [(4, 1 / 8, True), (5, 1 / 8, False)]
    assert sink.steps[5]["z_loss"] == 0.5


def test_multi_token_prediction_reaches_sinks_and_line(capsys):
    sink = MemorySink()
    model = SimpleNamespace(num_moe_experts=None, mtp_num_layers=1)
    state = make_state(sinks=[sink], model=model)
    state.mtp_metrics = MTPMetricsTracker()
    state.mtp_metrics.record(torch.tensor(8.0), 1, 1, accepted=3, predicted=4)
    call(state)
    assert sink.steps[5]["mtp_1 loss"] == 1.0
    assert sink.steps[5]["mtp_1_acceptance_rate"] == 75.0
    assert " lm loss: 2.500000E+00 | mtp_1 loss: 1.000000E+00 |" in fields(capsys.readouterr().out)


# --- timers -------------------------------------------------------------------------------------


def _foreign_timers(elapsed):
    timers = mock.MagicMock()
    timers.return_value.elapsed.return_value = elapsed
    return timers


def test_timers_of_another_library_write_themselves():
    state, totals = make_state(log_timers_to_tensorboard=True, timing_log_level=1), {}
    state.timers = timers = _foreign_timers(elapsed=0.5)
    trackers = all_trackers(state)
    call(state, totals=totals | {"advanced iterations": 4, "skipped iterations": 0})
    names = timers.write.call_args.args[0]
    assert names[0] == "forward-backward"
    assert timers.write.call_args == mock.call(
        names, trackers["tensorboard"], 5, normalizer=5, reset=False
    )
    assert timers.write_to_wandb.call_args == mock.call(
        names, trackers["wandb"], 5, normalizer=5, reset=False
    )
    assert timers.write_to_comet.call_args == mock.call(
        names, trackers["comet"], 5, normalizer=5, reset=True
    )
    assert timers.log.call_args == mock.call(names, normalizer=5)
    assert timers.return_value.elapsed.call_args == mock.call(barrier=True)


def test_timers_of_another_library_that_only_write_reset_themselves_there():
    state = make_state(log_timers_to_tensorboard=True, timing_log_level=1)
    written = []
    state.timers = SimpleNamespace(
        write=lambda *args, **options: written.append(options),
        log=lambda names, normalizer: None,
    )
    call(state)
    assert written == [{"normalizer": 1, "reset": True}]


def test_timer_intervals_of_trackers_and_console_are_separate(caplog):
    caplog.set_level(logging.INFO, logger="mcore.observe.timers")
    sink = MemorySink()
    state = make_state(
        step=0,
        sinks=[sink],
        tensorboard_log_interval=2,
        log_interval=3,
        timing_log_level=1,
        timing_log_option="max",
        log_timers_to_tensorboard=True,
    )
    totals = {}
    timer = state.timers("forward-backward", log_level=1)
    for step, seconds in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], start=1):
        timer.set_elapsed(timer.elapsed(reset=False) + seconds)
        state.train_state.step = step
        call(state, totals=totals)
    times = {step: got.get("forward-backward-time") for step, got in sink.steps.items()}
    assert times == {2: 1.5, 3: None, 4: 3.5, 6: 5.5}
    texts = [r.getMessage() for r in caplog.records if r.name == "mcore.observe.timers"]
    assert [re.search(r": ([\d.]+)$", text)[1] for text in texts] == ["2000.00", "5000.00"]


# --- what other libraries hand over -------------------------------------------------------------


def test_mocks_serve_as_containers(capsys):
    config, state = mock.MagicMock(), mock.MagicMock()
    config.logger.log_interval = config.logger.tensorboard_log_interval = 5
    config.train.micro_batch_size = 2
    config.data_parallel_size = 4
    config.model.num_moe_experts = config.model.mtp_num_layers = None
    state.train_state.step = 5
    state.train_state.consumed_train_samples = 640
    state.train_state.skipped_train_samples = 0
    state.get_num_microbatches.return_value = 8
    state.timers = _foreign_timers(elapsed=0.5)
    state.energy_monitor = None
    training_log(
        {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
        config, state, None, [mock.MagicMock()],
    )  # fmt: skip
    assert " global batch size:    64 | lm loss: 2.500000E+00 |" in capsys.readouterr().out
    assert state.comet_logger.log_metrics.call_args.args[0]["batch-size"] == 64


def test_plain_namespaces_serve_as_containers(capsys):
    config = SimpleNamespace(
        logger=SimpleNamespace(log_interval=1),
        train=SimpleNamespace(micro_batch_size=1),
    )
    state = SimpleNamespace(train_state=SimpleNamespace(step=1, consumed_train_samples=1))
    training_log(
        {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
        config, state, None, None,
    )  # fmt: skip
    assert fields(capsys.readouterr().out).startswith(" iteration        1 | consumed samples:")


# --- cost of a step that logs nothing -----------------------------------------------------------


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), f"{func} copies to the host"
        return func(*args, **(kwargs or {}))


def test_a_step_that_logs_nothing_runs_no_collective_and_reads_no_device(
    world_of_eight, monkeypatch
):
    world = dist.group.WORLD
    groups = SimpleNamespace(mp=world, pp=world, dp=world)
    state = make_state(
        step=0,
        sinks=[MemorySink()],
        log_interval=200,
        tensorboard_log_interval=200,
        timing_log_level=2,
        log_timers_to_tensorboard=True,
        log_memory_to_tensorboard=True,
        model=moe_model(mtp_num_layers=1),
    )
    state.moe_metrics, state.mtp_metrics = MoEMetricsTracker(), MTPMetricsTracker()

    def forbid(name):
        def fail(*args, **kwargs):
            raise AssertionError(f"{name} was called")

        return fail

    for name in ("all_reduce", "all_gather", "barrier", "broadcast", "reduce", "gather"):
        monkeypatch.setattr(dist, name, forbid(name))
    for name in ("all_gather_single", "all_gather_into_tensor", "all_gather_object"):
        monkeypatch.setattr(dist, name, forbid(name), raising=False)
    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbid(name))
    totals = {}
    losses = {f"loss {i}": torch.tensor(float(i)) for i in range(12)}
    with NoHostReads():
        for step in range(1, 101):
            state.train_state.step = step
            record_router(state.moe_metrics, 1.0)
            state.mtp_metrics.record(torch.tensor(1.0), 1, 1)
            call(
                state,
                losses,
                totals,
                lr=torch.tensor(0.5),
                grad_norm=torch.tensor(1.0),
                pg_collection=groups,
            )
    monkeypatch.undo()
    assert totals["advanced iterations"] == 100
    assert totals["loss 3"].tolist() == [300.0]


def test_the_writer_reads_all_device_values_in_one_transfer(monkeypatch):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t.shape), tolist(t))[1])
    state = make_state(sinks=[MemorySink()])
    losses = {f"loss {i}": torch.tensor(float(i)) for i in range(12)}
    with NoHostReads():
        call(state, losses, grad_norm=torch.tensor(1.0), lr=torch.tensor(0.5))
    # twelve losses of the step and their averages, gradient norm and learning rate twice each
    assert reads == [torch.Size([28])]
