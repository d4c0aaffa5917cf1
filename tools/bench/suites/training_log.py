"""The training log against loops that make one call for each metric, as those of peers do.

- Both write to MLflow on SQLite. Total work is the sum over the training thread and the background
  thread, which sends between steps of 20 ms. The other two rows are medians.
- The training thread encodes the values for the local spool, 50 us for 64 of them, so a kill loses
  none. An earlier version encoded in another thread: 130 us a step with 12 metrics.
- With one loss, the addition in float64 is 7 of 18 us of CPU time. Checks of names, values and
  intervals are most of the rest.
- A step without output costs more than bare sums if there is one loss, and less if there are many.
  The sums also read the learning rate twice, and on a GPU each read waits.
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
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bench.measure import Row, compare
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
_STEP_S = 0.02  # the step between two calls, while the background thread works
_LIMIT_S = 100e-6
_LAYER = [(768,), (3 * 768, 768), (768, 768), (768,), (4 * 768, 768), (768, 4 * 768)]
_HALF = type("Half", (), {"bf16": True, "fp16": False})()


def run() -> Iterable[Row]:
    """Yield the rows. The values that arrived are compared before any figure."""
    with tempfile.TemporaryDirectory(prefix="bench-training-log-") as folder:
        yield from _compare_mlflow(Path(folder), num_losses=4, steps=100, peer_steps=10)
        for num_losses in (16, 64):
            yield from _compare_mlflow(Path(folder), num_losses, steps=50, peer_steps=2)
    yield from _compare_quiet_steps()
    yield from _compare_norm("85 M parameters of 12 layers in bf16", _LAYER * 12, target=1.8)
    for num in (100, 1000, 10_000):
        yield from _compare_norm(f"{num} tensors of 1000 in bf16", [(1000,)] * num, target=None)


# --- MLflow -------------------------------------------------------------------------------------


def _compare_mlflow(folder: Path, num_losses: int, steps: int, peer_steps: int) -> Iterator[Row]:
    """Total work and the training thread's share of it, for one number of metrics."""
    losses = _make_losses(num_losses)
    state = _make_state(folder, f"ours {num_losses}")
    run = state.mlflow_logger
    run.open()
    (sink,) = state.sinks()
    with _time_calls(run.client, "log_batch") as sent, _time_calls(sink, "log") as handed:
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
    checked = f"{steps} steps read back, values of the last"
    background = f"{sum(sent) / steps * 1e3:.2g} ms, in {len(sent)} calls"
    note = f"the background thread's part {background}"
    total = f"{case}: total work a step"
    yield Row(total, work_s, _CALL_A_METRIC, peer_s, 10.0, checked, note)
    share = f"{case}: its share of the training thread"
    yield Row(share, statistics.median(handed), "limit", _LIMIT_S, 1.0, "as above")
    call = f"{case}: the whole call of training_log"
    yield Row(call, statistics.median(caller_s), _CALL_A_METRIC, peer_s, agreement="as above")


def _make_losses(num: int) -> dict[str, Tensor]:
    return {f"loss {index}": torch.tensor(index + 0.5) for index in range(num)}


def _log_one_by_one(folder: Path, ours: Any, losses: dict[str, Tensor], steps: int) -> float:
    """Send each metric of the last step in a separate call. Returns the seconds of a step."""
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


def _make_state(folder: Path, name: str) -> GlobalState:
    logger = LoggerConfig(
        log_interval=1_000_000, tensorboard_log_interval=1, mlflow_experiment="bench",
        mlflow_run_name=name, mlflow_tracking_uri=f"sqlite:///{folder}/mlflow.db",
        log_world_size_to_tensorboard=True,
    )  # fmt: skip
    train = TrainingConfig(micro_batch_size=1, train_iters=1_000_000)
    return GlobalState(ConfigContainer(logger=logger, train=train), train_state=TrainState())


def _log_and_train(state: GlobalState, losses: dict[str, Tensor], step: int) -> float:
    """Log a step, then compute for the time of a step. Returns the seconds of the call."""
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
def _time_calls(owner: Any, method: str) -> Iterator[list[float]]:
    """Collect the seconds of each call of a method, on any thread."""
    seconds: list[float] = []
    original = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> None:
        started_s = time.perf_counter()
        original(*args, **kwargs)
        seconds.append(time.perf_counter() - started_s)

    with patch.object(owner, method, timed):
        yield seconds


# --- steps without output -----------------------------------------------------------------------


def _compare_quiet_steps() -> Iterator[Row]:
    """A step at which no interval ends, with few and many losses."""
    for num_losses in (1, 12, 100):
        losses = _make_losses(num_losses)
        totals: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        ours, theirs = _make_quiet_step(losses, totals[0]), _make_step_of_sums(losses, totals[1])
        ours()
        theirs()
        is_same = all(totals[0][name].item() == totals[1][name].item() for name in losses)
        yield compare(
            f"step off the intervals, {num_losses} losses", ours, _SUM_A_LOSS, theirs,
            agreement="sums of the losses", difference="" if is_same else "other sums",
            number=200,
        )  # fmt: skip


def _make_quiet_step(losses: dict[str, Tensor], totals: dict[str, Any]) -> Callable[[], Any]:
    logger = LoggerConfig(log_interval=1000, tensorboard_log_interval=1000)
    config = ConfigContainer(logger=logger, train=TrainingConfig(micro_batch_size=1))
    state = GlobalState(config, train_state=TrainState(step=1))
    rate: Any = torch.tensor(1e-4)
    return lambda: training_log(
        losses, totals, rate, None, 1.0, False, 0, 2.5, 15.2, 0, config, state, [], []
    )


def _make_step_of_sums(losses: dict[str, Tensor], totals: dict[str, Any]) -> Callable[[], Any]:
    rate = torch.tensor(1e-4)

    def step() -> float:
        for name, loss in losses.items():
            zero = torch.tensor([0.0], dtype=torch.float)
            totals[name] = totals.get(name, zero) + loss
        return torch.tensor([rate.item()], dtype=torch.float32).item()

    return step


# --- norm of the parameters ---------------------------------------------------------------------


def _compare_norm(
    case: str, shapes: Iterable[tuple[int, ...]], target: float | None
) -> Iterator[Row]:
    """The norm against float32 copies of all parameters, and against one copy at a time."""
    model = _make_model(shapes)
    parameters = [parameter.detach() for parameter in model.parameters()]
    ours = functools.partial(calc_params_l2_norm, model, _HALF)
    exact = math.sqrt(sum(p.double().square().sum().item() for p in parameters))
    for peer, copies, aim in (
        ("fp32 copies, then their norms", lambda: [p.float() for p in parameters], target),
        ("one fp32 copy at a time", lambda: (p.float() for p in parameters), None),
    ):
        theirs = functools.partial(_compute_norm, copies)
        errors = [abs(norm / exact - 1) for norm in (ours(), theirs())]
        # The wider tolerance is for sums of a million squares in float32.
        is_wrong = errors[0] > 1e-6 or errors[1] > 1e-3
        yield compare(
            f"calc_params_l2_norm, {case}", ours, peer, theirs, aim,
            agreement=f"off by {errors[0]:.0e}, the peer by {errors[1]:.0e}",
            difference=f"off by {errors[0]:.0e} and {errors[1]:.0e}" if is_wrong else "",
            number=1 if len(parameters) > 500 else 3,
            note=lambda ours_s, peer_s: f"{ours_s / len(parameters) * 1e6:.3g} us a tensor",
        )  # fmt: skip


def _compute_norm(copies: Callable[[], Iterable[Tensor]]) -> float:
    squares = [torch.linalg.vector_norm(copy).square() for copy in copies()]
    return torch.stack(squares).sum().sqrt().item()


def _make_model(shapes: Iterable[tuple[int, ...]]) -> nn.Module:
    torch.manual_seed(0)
    values = (torch.randn(shape).bfloat16() for shape in shapes)
    return nn.ParameterList(nn.Parameter(value, requires_grad=False) for value in values)
