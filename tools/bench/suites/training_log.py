"""The training log against loops that make one call for each metric, as those of peers do.

- Both write to MLflow on SQLite. Total work is that of the training thread and of the background
  thread, which sends between steps of 20 ms; the other two rows are medians.
- A step on which nothing is logged costs more than bare sums if there is one loss, and less if
  there are many. The sums also read the learning rate twice; on a GPU each read waits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Row, paired
from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
    calc_params_l2_norm,
    training_log,
)

_CALL_A_METRIC = "one MLflow call for each metric"
_SUM_A_LOSS = "a zero and a sum for each loss"
_STEP_S = 0.02  # of a training step between two calls, in which the background thread works
_LIMIT_S = 100e-6
_HALF = type("Half", (), {"bf16": True, "fp16": False})()


def run() -> Iterable[Row]:
    """Yield the rows; what arrived is compared before any figure is given."""
    with tempfile.TemporaryDirectory(prefix="bench-training-log-") as folder:
        yield from _mlflow(Path(folder), num_losses=4, steps=100, peer_steps=10)
        for num_losses in (16, 64):
            yield from _mlflow(Path(folder), num_losses, steps=50, peer_steps=2)
    yield from _steps_without_output()
    yield from _norm("85 M parameters of 12 layers in bf16", _layers(12), target=1.8)
    for num in (100, 1000, 10_000):
        yield from _norm(f"{num} tensors of 1000 in bf16", _tensors(num), target=None)


# --- MLflow -------------------------------------------------------------------------------------


def _mlflow(folder: Path, num_losses: int, steps: int, peer_steps: int) -> Iterator[Row]:
    """Total work and the training thread's share of it, for one number of metrics."""
    losses = {f"loss {index}": torch.tensor(index + 0.5) for index in range(num_losses)}
    state = _state(folder, f"ours {num_losses}")
    run = state.mlflow_logger
    run.open()
    (sink,) = state.sinks()
    with _timed_calls(run.client, "log_batch") as sent, _timed_calls(sink, "log") as handed:
        caller_s = [_log_and_train(state, losses, step) for step in range(1, steps + 1)]
        run.flush()
    work_s = (sum(caller_s) + sum(sent)) / steps
    peer_s = _log_one_by_one(folder, run, losses, peer_steps)
    found = run.client.get_run(run.run_id).data.metrics
    state.close()
    case = f"MLflow, {len(found)} metrics a step"
    history = run.client.get_metric_history(run.run_id, "loss 0")
    if sorted(m.step for m in history) != list(range(1, steps + 1)):
        yield Row.disagreement(case, _CALL_A_METRIC, f"{len(history)} of {steps} steps arrived")
        return
    yield Row(
        f"{case}: total work a step",
        work_s,
        _CALL_A_METRIC,
        peer_s,
        target=10.0,
        agreement=f"{steps} steps read back, values of the last",
        note=f"the background thread's part {sum(sent) / steps * 1e3:.2g} ms, in {len(sent)} calls",
    )
    yield Row(
        f"{case}: its share of the training thread",
        statistics.median(handed),
        "limit",
        _LIMIT_S,
        target=1.0,
        agreement="as above",
    )
    yield Row(
        f"{case}: the whole call of training_log",
        statistics.median(caller_s),
        _CALL_A_METRIC,
        peer_s,
        agreement="as above",
    )


def _log_one_by_one(folder: Path, ours: Any, losses: dict[str, Tensor], steps: int) -> float:
    """Send the metrics of the last step as one call each; return the seconds of a step."""
    import mlflow
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    metrics = client.get_run(ours.run_id).data.metrics
    run_id = client.create_run(client.get_run(ours.run_id).info.experiment_id).info.run_id
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    started_s = time.perf_counter()
    for step in range(steps):
        for name, value in metrics.items():
            sent = losses[name].item() if name in losses else value
            mlflow.log_metrics({name: sent}, step=step, run_id=run_id)
    elapsed_s = time.perf_counter() - started_s
    if client.get_run(run_id).data.metrics != metrics:
        raise RuntimeError("the two runs hold different values")
    return elapsed_s / steps


def _state(folder: Path, name: str) -> GlobalState:
    logger = LoggerConfig(
        log_interval=1_000_000,
        tensorboard_log_interval=1,
        mlflow_experiment="bench",
        mlflow_run_name=name,
        mlflow_tracking_uri=f"sqlite:///{folder}/mlflow.db",
        log_world_size_to_tensorboard=True,
    )
    train = TrainingConfig(micro_batch_size=1, train_iters=1_000_000)
    return GlobalState(ConfigContainer(logger=logger, train=train), train_state=TrainState())


def _log_and_train(state: GlobalState, losses: dict[str, Tensor], step: int) -> float:
    """Log a step, then compute for the time of one; return the seconds of the call."""
    state.train_state.step = step
    state.train_state.consumed_train_samples = step
    started_s = time.perf_counter()
    training_log(
        losses, {}, 1e-4, None, 1.0, False, 0, 2.5, 15.2, 0, state.cfg, state, None, None
    )  # fmt: skip
    logged_s = time.perf_counter()
    matrix = torch.ones(256, 256)
    while time.perf_counter() < logged_s + _STEP_S:
        matrix @ matrix
    return logged_s - started_s


@contextlib.contextmanager
def _timed_calls(owner: Any, method: str) -> Iterator[list[float]]:
    """Collect the seconds that each call of a method takes, whichever thread makes it."""
    seconds: list[float] = []
    original = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> None:
        started_s = time.perf_counter()
        original(*args, **kwargs)
        seconds.append(time.perf_counter() - started_s)

    setattr(owner, method, timed)
    try:
        yield seconds
    finally:
        delattr(owner, method)


# --- steps without output -----------------------------------------------------------------------


def _steps_without_output() -> Iterator[Row]:
    """A step at which no interval ends, with few and many losses."""
    for num_losses in (1, 12, 100):
        losses = {f"loss {index}": torch.tensor(index + 0.5) for index in range(num_losses)}
        ours, ours_totals = _quiet_step(losses)
        theirs, their_totals = _step_of_sums(losses)
        case = f"step off the intervals, {num_losses} losses"
        for step in (ours, theirs):
            step()
        if any(ours_totals[name].item() != their_totals[name].item() for name in losses):
            yield Row.disagreement(case, _SUM_A_LOSS, "other sums")
            continue
        ours_s, peer_s = paired(ours, theirs, number=200)
        yield Row(
            case,
            ours_s,
            _SUM_A_LOSS,
            peer_s,
            agreement="sums of the losses",
        )


def _quiet_step(losses: dict[str, Tensor]) -> tuple[Callable[[], Any], dict[str, Any]]:
    logger = LoggerConfig(log_interval=1000, tensorboard_log_interval=1000)
    config = ConfigContainer(logger=logger, train=TrainingConfig(micro_batch_size=1))
    state = GlobalState(config, train_state=TrainState(step=1))
    totals: dict[str, Any] = {}
    rate: Any = torch.tensor(1e-4)

    def step() -> None:
        training_log(losses, totals, rate, None, 1.0, False, 0, 2.5, 15.2, 0, config, state, [], [])

    return step, totals


def _step_of_sums(losses: dict[str, Tensor]) -> tuple[Callable[[], Any], dict[str, Any]]:
    totals: dict[str, Any] = {}
    rate = torch.tensor(1e-4)

    def step() -> float:
        for name, loss in losses.items():
            zero = torch.tensor([0.0], dtype=torch.float)
            totals[name] = totals.get(name, zero) + loss
        return torch.tensor([rate.item()], dtype=torch.float32).item()

    return step, totals


# --- norm of the parameters ---------------------------------------------------------------------


def _norm(case: str, model: nn.Module, target: float | None) -> Iterator[Row]:
    """The norm against float32 copies of all parameters, and against one copy at a time."""
    parameters = [parameter.detach() for parameter in model.parameters()]

    def ours() -> float:
        return calc_params_l2_norm(model, _HALF)

    exact = math.sqrt(sum(p.double().square().sum().item() for p in parameters))
    number = 1 if len(parameters) > 500 else 3
    for peer, copies, wanted in (
        ("fp32 copies, then their norms", lambda: [p.float() for p in parameters], target),
        ("one fp32 copy at a time", lambda: (p.float() for p in parameters), None),
    ):
        copied = functools.partial(_norm_of_copies, copies)
        errors = [abs(norm / exact - 1) for norm in (ours(), copied())]
        # Sums of a million squares in float32 are what the wider tolerance is for.
        if errors[0] > 1e-6 or errors[1] > 1e-3:
            yield Row.disagreement(case, peer, f"off by {errors[0]:.0e} and {errors[1]:.0e}")
            continue
        ours_s, peer_s = paired(ours, copied, number=number)
        yield Row(
            f"calc_params_l2_norm, {case}",
            ours_s,
            peer,
            peer_s,
            target=wanted,
            agreement=f"off by {errors[0]:.0e}, the peer by {errors[1]:.0e}",
            note=f"{ours_s / len(parameters) * 1e6:.3g} us a tensor",
        )


def _norm_of_copies(copies: Callable[[], Iterable[Tensor]]) -> float:
    squares = [torch.linalg.vector_norm(copy).square() for copy in copies()]
    return torch.stack(squares).sum().sqrt().item()


def _layers(num: int) -> nn.Module:
    shapes = [(768,), (3 * 768, 768), (768, 768), (768,), (4 * 768, 768), (768, 4 * 768)] * num
    return _module([torch.randn(shape) for shape in shapes])


def _tensors(num: int) -> nn.Module:
    return _module([torch.randn(1000) for _ in range(num)])


def _module(values: list[Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(v.bfloat16(), requires_grad=False) for v in values)
