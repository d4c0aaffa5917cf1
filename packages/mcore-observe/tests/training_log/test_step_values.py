"""Which scalars the training log sends, to which sinks, at which steps."""

import json
import logging
import math
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from mcore.observe import JsonlSink, MemorySink, TrainingConfig


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


def all_trackers(state):
    trackers = {name: Recorder() for name in ("tensorboard", "wandb", "mlflow", "comet")}
    for name, recorder in trackers.items():
        setattr(state, f"{name}_logger", recorder)
    return trackers


@pytest.mark.usefixtures("on_each_device")
def test_one_call_for_each_tracker(make_state, log_step):
    state = make_state(log_interval=100)
    state.train_state.skipped_train_samples = 7
    trackers = all_trackers(state)
    log_step(state, grad_norm=2.0)
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


@pytest.mark.usefixtures("on_each_device")
def test_tensorboard_also_gets_scalars_over_samples(make_state, log_step):
    state = make_state(log_interval=100, log_world_size_to_tensorboard=True)
    state.train_state.skipped_train_samples = 7
    tensorboard = all_trackers(state)["tensorboard"]
    log_step(
        state, grad_norm=2.0, num_zeros_in_grad=3, params_norm=4.0, log_max_attention_logit=5.0
    )
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


@pytest.mark.usefixtures("on_each_device")
def test_mlflow_has_its_own_name_for_tflops_per_device(make_state, log_step):
    state = make_state(log_throughput_to_tensorboard=True)
    state.train_state.floating_point_operations_so_far = 3e12
    state.timers("interval-time", log_level=0).set_elapsed(1.5)
    trackers = all_trackers(state)
    log_step(state)
    (mlflow,) = trackers["mlflow"].calls
    assert mlflow[1]["throughput/tflops_per_device"] == pytest.approx(2.0)
    assert "throughput/tflops_device" not in mlflow[1]
    assert trackers["wandb"].calls[0][1]["throughput/tflops/device"] == pytest.approx(2.0)


@pytest.mark.usefixtures("on_each_device")
def test_the_step_loss_is_sent_and_not_the_average(make_state, log_step):
    sink = MemorySink()
    state, totals = make_state(step=4, sinks=[sink], tensorboard_log_interval=1), {}
    log_step(state, {"lm loss": torch.tensor(4.0)}, totals)
    state.train_state.step = 5
    log_step(state, {"lm loss": torch.tensor(2.0)}, totals)
    assert [sink.steps[step]["lm loss"] for step in (4, 5)] == [4.0, 2.0]


def test_comet_alone_gets_one_call_without_losses(make_state, log_step):
    state = make_state()
    state.comet_logger = Recorder()
    log_step(state, {})
    ((method, metrics, step),) = state.comet_logger.calls
    assert (method, step) == ("log_metrics", 5)
    assert {"learning-rate", "batch-size"} <= set(metrics)


@pytest.mark.usefixtures("on_each_device")
def test_decoupled_learning_rate(make_state, log_step):
    sink = MemorySink()
    log_step(make_state(sinks=[sink]), decoupled_learning_rate=0.25)
    log_step(make_state(step=10, sinks=[sink], optimizer=SimpleNamespace(decoupled_lr=1)))
    state = make_state(step=15, sinks=[sink], optimizer=SimpleNamespace(decoupled_lr=1))
    log_step(state, decoupled_learning_rate=0.25)
    names = "decoupled-learning-rate"
    assert [sink.steps[step].get(names) for step in (5, 10, 15)] == [None, None, 0.25]


def test_reports_that_are_switched_on(make_state, log_step, monkeypatch):
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
    log_step(state, model=[layer], history_wct=[1.0, 3.0], seq_length=10, loaded_iteration=3)
    got = sink.steps[5]
    assert got["throughput/batches_per_sec"] == 0.5
    assert got["throughput/tokens_per_sec"] == 0.5 * 64 * 10
    assert got["time/remaining_estimate"] == 10.0 / 2 * 995
    assert got["time/tokens"] == 640 * 10
    assert got["memory/mem-host-rss-gigabytes"] > 0
    assert got["l2_norm/grad/global"] == 3.0


@pytest.mark.usefixtures("on_each_device")
def test_sequence_length(make_state, log_step):
    sink = MemorySink()
    state = make_state(sinks=[sink], log_runtime_to_tensorboard=True)
    state.cfg.dataset.seq_length = 3
    log_step(state)
    assert sink.steps[5]["time/tokens"] == 640 * 3
    state.train_state.step = 10
    log_step(state, seq_length=2)
    assert sink.steps[10]["time/tokens"] == 640 * 2


@pytest.mark.usefixtures("on_each_device")
def test_gradient_norms_need_the_model(make_state, log_step):
    with pytest.raises(ValueError, match="the model is None; give the model"):
        log_step(make_state(log_l2_norm_grad_to_tensorboard=True))


@pytest.mark.usefixtures("on_each_device")
def test_sinks_and_console_have_intervals_of_their_own(make_state, log_step, capsys):
    sink = MemorySink()
    state, totals = make_state(step=0, sinks=[sink], tensorboard_log_interval=2, log_interval=3), {}
    for step in range(1, 7):
        state.train_state.step = step
        log_step(state, {"lm loss": torch.tensor(float(step))}, totals)
    assert sorted(sink.steps) == [2, 4, 6]
    averages = re.findall(r"lm loss: (\S+)", capsys.readouterr().out)
    assert averages == ["2.000000E+00", "5.000000E+00"]


@pytest.mark.usefixtures("on_each_device")
def test_a_failing_tracker_is_one_warning(make_state, log_step, caplog):
    sink = MemorySink()
    state = make_state(sinks=[sink], tensorboard_log_interval=1, log_interval=100)
    state.comet_logger = Recorder(fail_with=OSError("no network"))
    for step in (1, 2, 3):
        state.train_state.step = step
        log_step(state)
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(records) == 1
    assert "Comet" in records[0].getMessage()
    assert sorted(sink.steps) == [1, 2, 3]


@pytest.mark.usefixtures("on_each_device")
def test_a_tracker_is_switched_off_after_ten_failures(make_state, log_step, caplog):
    state = make_state(tensorboard_log_interval=1, log_interval=100)
    state.comet_logger = Recorder(fail_with=OSError("no network"))
    for step in range(1, 13):
        state.train_state.step = step
        log_step(state)
    assert len(state.comet_logger.calls) == 10
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"]


@pytest.mark.usefixtures("on_each_device")
def test_jsonl_holds_what_the_trackers_got(make_state, log_step, tmp_path):
    path = tmp_path / "metrics.jsonl"
    state = make_state(sinks=[JsonlSink(path)], tensorboard_log_interval=1, log_interval=100)
    for step, loss in ((1, 2.5), (2, math.nan)):
        state.train_state.step = step
        log_step(state, {"lm loss": torch.tensor(loss)})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[-1]["step"] == step  # there at once, not only when the sink is closed
    assert [line["lm loss"] for line in lines] == [2.5, None]
    assert lines[0]["samples vs steps"] == 640
    assert lines[0]["batch-size"] == 64


@pytest.mark.usefixtures("on_each_device")
def test_event_files_hold_the_documented_tags(make_state, log_step, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    state = make_state(
        step=0, tensorboard_dir=str(tmp_path), tensorboard_log_interval=1, closing_s=120.0
    )
    for step in (1, 2):
        state.train_state.step = step
        state.train_state.consumed_train_samples = 64 * step
        log_step(state, {"lm loss": torch.tensor(2.0 * step)})
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
def test_mlflow_holds_every_metric_after_close(make_state, log_step, tmp_path, request):
    tracking = pytest.importorskip("mlflow.tracking")
    uri = request.getfixturevalue("mlflow_database")(tmp_path / "mlflow.db")
    state = make_state(
        step=0,
        tensorboard_log_interval=1,
        mlflow_experiment="observe",
        mlflow_run_name="one",
        mlflow_tracking_uri=uri,
        closing_s=120.0,
        comet_api_key="very secret",
    )
    for step in (1, 2):
        state.train_state.step = step
        log_step(state, {"lm loss": torch.tensor(2.0 * step), "acc@1": torch.tensor(math.nan)})
    run_id = state.mlflow_logger.open().run_id
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


CALCULATOR = "megatron.core.num_microbatches_calculator"


@pytest.fixture
def batch_size(make_state, log_step):
    """Returns the batch size that is sent, with micro batches of 2 on 4 ranks."""

    def sent(state=None, **train):
        sizes = {"micro_batch_size": 2, "global_batch_size": 64} | train
        sink = MemorySink()
        run = make_state(sinks=[sink], train=TrainingConfig(**sizes))
        if state is not None:
            run.get_num_microbatches = state.get_num_microbatches
        log_step(run)
        return sink.steps[5]["batch-size"]

    return sent


def calculator(count):
    module = ModuleType(CALCULATOR)
    module.get_num_microbatches = count
    return module


@pytest.mark.usefixtures("on_each_device")
def test_sources_of_the_number_of_microbatches(monkeypatch, batch_size):
    monkeypatch.setitem(sys.modules, CALCULATOR, calculator(lambda: 5))
    state = SimpleNamespace(get_num_microbatches=lambda: 3)
    assert batch_size(state, num_microbatches=4) == 8 * 3
    assert batch_size(num_microbatches=4) == 8 * 4
    assert batch_size() == 8 * 5
    monkeypatch.delitem(sys.modules, CALCULATOR)
    assert batch_size() == 8 * 8
    assert batch_size(global_batch_size=None) == 8


@pytest.mark.usefixtures("on_each_device")
def test_a_calculator_that_is_not_set_up_is_passed_over(monkeypatch, batch_size):
    def not_set_up():
        raise AttributeError("'NoneType' object has no attribute 'get'")

    monkeypatch.setitem(sys.modules, CALCULATOR, calculator(not_set_up))
    assert batch_size() == 64


@pytest.mark.usefixtures("on_each_device")
def test_mocks_are_not_numbers_of_microbatches(batch_size):
    train = {"global_batch_size": 16, "num_microbatches": mock.MagicMock()}
    assert batch_size(mock.MagicMock(), **train) == 16


@pytest.mark.usefixtures("on_each_device")
def test_data_parallel_size_of_the_training_settings(make_state, log_step):
    sink = MemorySink()
    train = TrainingConfig(micro_batch_size=2, data_parallel_size=3)
    state = make_state(sinks=[sink], train=train)
    state.cfg.data_parallel_size = None
    log_step(state)
    assert sink.steps[5]["batch-size"] == 6
