"""Every figure of a run with a batch ramp, a skipped step, a NaN and a resume, computed by hand."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    MemorySink,
    MoEMetricsTracker,
    MTPMetricsTracker,
    TrainingConfig,
    TrainState,
    training_log,
)

TFLOP = 10**12
# step: forward passes, loss, skipped, samples consumed, samples skipped. A pass has 8 samples,
# 2 on each of 4 ranks; a sample takes one TFLOP.
STEPS = {
    1: (1, 4.0, 0, 8, 0),
    2: (1, math.nan, 1, 8, 8),
    3: (2, 2.0, 0, 24, 8),
    4: (2, 1.0, 0, 40, 8),
    5: (4, math.nan, 0, 72, 8),
    6: (4, 3.0, 0, 104, 8),
    7: (4, 0.5, 0, 136, 8),
    8: (4, 0.25, 0, 168, 8),
    9: (4, 0.75, 0, 200, 8),
    10: (4, 1.0, 0, 232, 8),
    11: (4, 2.0, 0, 264, 8),
    12: (4, -6.0, 0, 296, 8),
}
SECONDS = {3: 0.6, 6: 1.0, 9: 0.9, 12: 1.2}  # of each interval of three steps


class Run:
    """One start of a training process."""

    def __init__(self, monkeypatch, loaded=0, **logger):
        settings = {
            "log_interval": 3,
            "tensorboard_log_interval": 1,
            "log_throughput": True,
            "runtime_time_unit": "seconds",
            "throughput_window_size": 2,
            "timing_log_level": 1,
        } | {
            f"log_{what}_to_tensorboard": True
            for what in ("throughput", "runtime", "timers", "l2_norm_grad", "world_size")
        }
        config = ConfigContainer(
            # The sizes at the end of the ramp.
            train=TrainingConfig(micro_batch_size=2, global_batch_size=64, train_iters=1000),
            logger=LoggerConfig(**settings | {"console_format": "megatron"} | logger),
            data_parallel_size=4,
        )
        self.sink = MemorySink()
        self.state = GlobalState(config, train_state=TrainState(), extra_sinks=[self.sink])
        self.state.start_time = 100.0
        self.state.energy_monitor = SimpleNamespace(lap=lambda: 300.0, shutdown=lambda: None)
        self.loaded, self.totals, self.monkeypatch = loaded, {}, monkeypatch
        self.chunks = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        if loaded:
            self._set_progress(loaded)

    def _set_progress(self, step):
        self.passes, _, _, consumed, skipped = STEPS[step]
        self.state.get_num_microbatches = lambda: self.passes
        train_state = self.state.train_state
        train_state.step = step
        train_state.consumed_train_samples = consumed
        train_state.skipped_train_samples = skipped
        train_state.floating_point_operations_so_far = consumed * TFLOP

    def step(self, step, **options):
        _, loss, skipped, *_ = STEPS[step]
        self._set_progress(step)
        # A step ends every 10 s after the start at 100 s.
        self.monkeypatch.setattr("time.time", lambda: 100.0 + 10 * (step - self.loaded))
        stamps = [100.0 + 10 * s for s in range(1, step - self.loaded + 1)]
        if step in SECONDS:
            timer = self.state.timers("interval-time", log_level=0)
            timer.set_elapsed(SECONDS[step])
        if self.state.cfg.logger.timing_log_level:
            timer = self.state.timers("forward-backward", log_level=1)
            timer.set_elapsed(timer.elapsed(reset=False) + step)
        for chunk, gradient in zip(self.chunks, (3.0 * step, 4.0 * step), strict=True):
            chunk.weight.grad = torch.full((1, 1), gradient)
        training_log(
            {"lm loss": torch.tensor(loss)}, self.totals, 1e-4 * step, None, 1.0, False, skipped,
            None, None, None, self.state.cfg, self.state, stamps, self.chunks,
            loaded_iteration=self.loaded, seq_length=10, **options,
        )  # fmt: skip


def line_fields(line):
    texts = [text.split(":", 1) for text in line.split("]", 1)[1].split(" |")[1:] if ":" in text]
    return {name.strip(): value.strip() for name, value in texts}


@pytest.fixture
def runs(monkeypatch, capsys):
    """A run of six steps and its continuation from there: scalars and console lines."""
    first, resumed = Run(monkeypatch), Run(monkeypatch, loaded=6)
    for step in range(1, 7):
        first.step(step)
    for step in range(7, 13):
        resumed.step(step)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith(" [")]
    numbers = [int(re.search(r"iteration\s+(\d+)/", line)[1]) for line in lines]
    assert numbers == [3, 6, 9, 12]
    return first.sink.steps | resumed.sink.steps, dict(
        zip(numbers, map(line_fields, lines), strict=True)
    )


def test_losses_of_steps_and_of_intervals(runs):
    scalars, lines = runs
    for step, (_, loss, *_) in STEPS.items():
        assert scalars[step]["lm loss"] == pytest.approx(loss, nan_ok=True)
    # (4 + 2) / 2 without the skipped step; a NaN that was not skipped; a resume; a negative one
    averages = {3: "3.000000E+00", 6: "NAN", 9: "5.000000E-01", 12: "-1.000000E+00"}
    assert {step: fields["lm loss"] for step, fields in lines.items()} == averages
    counts = {
        step: (fields["number of skipped iterations"], fields["number of nan iterations"])
        for step, fields in lines.items()
    }
    assert counts == {3: ("1", "1"), 6: ("0", "0"), 9: ("0", "0"), 12: ("0", "0")}


def test_samples_and_batch_sizes_follow_the_ramp(runs):
    scalars, lines = runs
    for step, (passes, _, _, consumed, skipped) in STEPS.items():
        assert scalars[step]["batch-size"] == 8 * passes
        assert scalars[step]["samples vs steps"] == consumed
        assert scalars[step].get("skipped-train-samples") == (skipped or None)
        assert scalars[step]["time/samples"] == consumed
        assert scalars[step]["time/tokens"] == 10 * consumed
        assert scalars[step]["time/batches"] == step
    sizes = {step: fields["global batch size"] for step, fields in lines.items()}
    assert sizes == {3: "16", 6: "32", 9: "32", 12: "32"}
    consumed = {step: fields["consumed samples"] for step, fields in lines.items()}
    assert consumed == {3: "24", 6: "104", 9: "200", 12: "296"}
    assert lines[3]["skipped samples"] == "8"


def test_time_of_an_iteration_counts_skipped_steps_too(runs):
    scalars, lines = runs
    times = {step: fields["elapsed time per iteration (ms)"] for step, fields in lines.items()}
    assert times == {3: "200.0", 6: "333.3", 9: "300.0", 12: "400.0"}
    for step, seconds in SECONDS.items():
        assert scalars[step]["iteration-time"] == pytest.approx(seconds / 3)


def test_operations_a_second_in_the_ramp_and_after_the_resume(runs):
    scalars, lines = runs
    # 24 TFLOP in 0.6 s; 80 in 1.0 s; none for the rest of an interval; 96 in 1.2 s
    shown = {step: fields.get("throughput per GPU (TFLOP/s/GPU)") for step, fields in lines.items()}
    assert shown == {3: "40.0", 6: "80.0", 9: None, 12: "80.0"}
    found = {step: scalars[step].get("throughput/tflops") for step in SECONDS}
    assert found == {3: pytest.approx(40.0), 6: pytest.approx(80.0), 9: None, 12: pytest.approx(80)}


def test_samples_a_second_have_the_batch_size_of_the_step(runs):
    scalars, _ = runs
    for step, (passes, *_) in STEPS.items():
        got = scalars[step]
        if step in (1, 7):  # the window of this process is not full
            assert not any(name.startswith("throughput/b") for name in got)
            continue
        assert got["throughput/batches_per_sec"] == pytest.approx(0.1)
        assert got["throughput/samples_per_sec"] == pytest.approx(0.1 * 8 * passes)
        assert got["throughput/tokens_per_sec"] == pytest.approx(0.1 * 8 * passes * 10)
        assert got["throughput/device/samples_per_sec"] == pytest.approx(0.1 * 8 * passes)
        assert got["throughput/global_batch_size"] == 8 * passes
        assert got["throughput/micro_batch_size"] == 2


def test_time_left_counts_steps_of_this_process_only(runs):
    scalars, _ = runs
    for step in STEPS:
        steps_here = step - (6 if step > 6 else 0)
        assert scalars[step]["time/total"] == pytest.approx(10 * steps_here)
        assert scalars[step]["time/remaining_estimate"] == pytest.approx(10 * (1000 - step))


def test_timers_are_per_step_since_the_tracker_last_saw_them(runs):
    scalars, _ = runs
    assert {step: scalars[step]["forward-backward-time"] for step in STEPS} == {
        step: pytest.approx(step) for step in STEPS
    }


def test_energy_of_a_step_counts_skipped_steps_too(runs):
    scalars, lines = runs
    # 300 J in each interval of three steps
    assert [scalars[step]["iter-energy/gpu"] for step in SECONDS] == [pytest.approx(100.0)] * 4
    watts = [scalars[step]["power/gpu"] for step in SECONDS]
    assert watts == pytest.approx([500.0, 300.0, 1000 / 3, 250.0])
    assert lines[3]["energy per GPU (J/iter/GPU)"] == "100.0"
    assert lines[9]["power per GPU (W/GPU)"] == "333.3"


def test_gradients_of_two_model_chunks(runs):
    scalars, _ = runs
    for step in STEPS:
        assert scalars[step]["l2_norm/grad/weight"] == pytest.approx(3.0 * step)
        assert scalars[step]["l2_norm/grad/chunk1.weight"] == pytest.approx(4.0 * step)
        assert scalars[step]["l2_norm/grad/global"] == pytest.approx(5.0 * step)


def test_learning_rate_is_that_of_the_step(runs):
    scalars, lines = runs
    assert [scalars[step]["learning-rate"] for step in STEPS] == pytest.approx(
        [1e-4 * step for step in STEPS]
    )
    assert lines[12]["learning rate"] == "1.200000E-03"


def expert_model():
    return SimpleNamespace(
        num_moe_experts=4,
        num_layers=2,
        moe_router_load_balancing_type="aux_loss",
        moe_z_loss_coeff=None,
        mtp_num_layers=1,
    )


def record_experts(state, loss, passes):
    """Record what a step of some forward passes does, each with the same loss."""
    for _ in range(passes):
        for layer in (1, 2):
            state.moe_metrics.record("load_balancing_loss", torch.tensor(loss), layer, 3)
        # the layer of multi-token prediction has experts too
        state.moe_metrics.record("load_balancing_loss", torch.tensor(loss), 3, 3)
        state.mtp_metrics.record(torch.tensor(10 * loss), 1, 1)


def test_losses_of_experts_are_means_over_the_passes_that_each_step_had(monkeypatch, capsys):
    run = Run(monkeypatch, tensorboard_log_interval=3)
    run.state.cfg.model = expert_model()
    run.state.moe_metrics, run.state.mtp_metrics = MoEMetricsTracker(), MTPMetricsTracker()
    for step, loss in zip(range(1, 7), (1.0, 50.0, 2.0, 4.0, 5.0, 9.0), strict=True):
        record_experts(run.state, loss, STEPS[step][0])
        run.step(step)
    # step 2 was skipped: (1 + 2) / 2, then (4 + 5 + 9) / 3
    found = {step: got["load_balancing_loss"] for step, got in run.sink.steps.items()}
    assert found == {3: pytest.approx(1.5), 6: pytest.approx(6.0)}
    found = {step: got["mtp_1 loss"] for step, got in run.sink.steps.items()}
    assert found == {3: pytest.approx(15.0), 6: pytest.approx(60.0)}
    lines = [line_fields(t) for t in capsys.readouterr().out.splitlines() if t.startswith(" [")]
    assert [line["load_balancing_loss"] for line in lines] == ["1.500000E+00", "6.000000E+00"]
    assert [line["mtp_1 loss"] for line in lines] == ["1.500000E+01", "6.000000E+01"]


class NoScalarReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), f"{func} copies to the host"
        return func(*args, **(kwargs or {}))


def test_with_everything_on_a_step_takes_one_copy_and_one_call_for_each_tracker(monkeypatch):
    run = Run(monkeypatch, log_memory_to_tensorboard=True, timing_log_level=0)
    run.state.cfg.model = expert_model()
    run.state.moe_metrics, run.state.mtp_metrics = MoEMetricsTracker(), MTPMetricsTracker()
    calls = {name: [] for name in ("wandb", "mlflow", "comet")}
    run.state.wandb_logger = SimpleNamespace(log=lambda m, step: calls["wandb"].append(m))
    for name in ("mlflow", "comet"):
        client = SimpleNamespace(log_metrics=lambda m, step, kept=calls[name]: kept.append(m))
        setattr(run.state, f"{name}_logger", client)
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t.shape), tolist(t))[1])
    for step in (1, 3):  # the tick alone, then with the console line
        record_experts(run.state, 1.0, 1)
        reads.clear()
        with NoScalarReads():
            run.step(step)
        assert len(reads) == 1, reads
    for name, got in calls.items():
        assert len(got) == 2, name
        assert len(got[1]) > 25
