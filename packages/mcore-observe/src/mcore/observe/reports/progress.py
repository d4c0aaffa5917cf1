"""Progress of a run: elapsed and remaining time, batches, samples and tokens per second."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mcore.parallel import groups
from mcore.versioning.process_rank import process_rank

logger = logging.getLogger(__name__)

SECONDS_PER_UNIT = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def report_runtime(
    train_state: Any,
    start_time: float,
    seq_length: int | None,
    train_iters: int | None,
    time_unit: str = "seconds",
    *,
    start_step: int = 0,
) -> dict[str, float | int]:
    """Report elapsed time, an estimate of the remaining time, and consumed samples and tokens.

    The estimate is ``elapsed / (step - start_step) * (train_iters - step)``, at least 0. Only steps
    of this process count: those of earlier processes would make a resumed run look too fast. No
    communication.

    Args:
        train_state: An object with ``step`` and ``consumed_train_samples``.
        start_time: Start of this process, in seconds of ``time.time()``.
        seq_length: Tokens of a sample. None or 0 omits the tokens.
        train_iters: Steps of the whole run. None omits the estimate.
        time_unit: Unit of the times: seconds, minutes, hours or days.
        start_step: The step at which this process started, 0 unless it resumed a run.

    Returns:
        ``time/remaining_estimate`` and ``time/total`` in ``time_unit``, ``time/tokens``,
        ``time/samples`` and ``time/batches`` as counts over the whole run. The estimate is omitted
        before the first step of this process.

    Raises:
        ValueError: Unknown time unit.

    Example:
        >>> from types import SimpleNamespace
        >>> state = SimpleNamespace(step=100, consumed_train_samples=1000)
        >>> report = report_runtime(state, time.time() - 50, 2048, 1000)
        >>> round(report["time/remaining_estimate"]), report["time/tokens"]
        (450, 2048000)
    """
    if time_unit not in SECONDS_PER_UNIT:
        raise ValueError(f"time_unit is {time_unit!r}: give one of {list(SECONDS_PER_UNIT)}")
    elapsed = (time.time() - start_time) / SECONDS_PER_UNIT[time_unit]
    step, samples = train_state.step, train_state.consumed_train_samples
    report: dict[str, float | int] = {}
    if train_iters is not None and step > start_step:
        per_step = elapsed / (step - start_step)
        report["time/remaining_estimate"] = max(per_step * (train_iters - step), 0.0)
    if seq_length:
        report["time/tokens"] = samples * seq_length
    report["time/samples"] = samples
    report["time/batches"] = step
    report["time/total"] = elapsed
    return report


def report_throughput(
    train_config: Any,
    iteration: int,
    seq_length: int | None,
    history_wct: Sequence[float] | None,
    window_size: int,
    *,
    world_size: int | None = None,
) -> dict[str, float | int]:
    """Report batches, samples and tokens per second over the last steps.

    With ``n + 1`` time stamps the rate is ``n / (last - first)``. The last ``window_size + 1``
    stamps count, or all if there are fewer. Samples are computed from the current global batch
    size, even for earlier steps of a batch-size ramp. No communication.

    Args:
        train_config: An object with ``micro_batch_size`` and ``global_batch_size``.
        iteration: The step, for the warning only.
        seq_length: Tokens of a sample. None or 0 omits the tokens.
        history_wct: Time stamps in seconds, one for each finished step, newest last. Not
            durations. None reports nothing.
        window_size: Stamps needed before anything is reported, 2 or more.
        world_size: Ranks for the rates per device. None means the size of the job.

    Returns:
        ``throughput/batches_per_sec``, ``throughput/samples_per_sec`` and
        ``throughput/tokens_per_sec``, the same three under ``throughput/device/`` divided by the
        world size, ``throughput/micro_batch_size`` and ``throughput/global_batch_size``. Empty
        before the window is full, and, with a warning on rank 0, if the stamps decrease or span no
        time.

    Example:
        >>> from types import SimpleNamespace
        >>> train = SimpleNamespace(micro_batch_size=4, global_batch_size=64)
        >>> report = report_throughput(train, 5, 4096, [0.9, 1.7, 2.9, 4.2, 5.9], 5)
        >>> round(report["throughput/batches_per_sec"], 6)
        0.8
    """
    if history_wct is None or window_size < 2 or len(history_wct) < window_size:
        return {}
    stamps = list(history_wct)[-(window_size + 1) :]
    elapsed_wct = stamps[-1] - stamps[0]
    decrease = any(later < earlier for earlier, later in pairwise(stamps))
    if elapsed_wct <= 0 or decrease:
        if process_rank() == 0:
            logger.warning(
                "no throughput at iteration %d: elapsed_wct is %s s and %s. history_wct needs one "
                "time stamp for each finished step, not durations",
                iteration,
                elapsed_wct,
                "the stamps decrease" if decrease else "the stamps span no time",
            )
        return {}
    batches = (len(stamps) - 1) / elapsed_wct
    rates = {
        "batches_per_sec": batches,
        "samples_per_sec": batches * train_config.global_batch_size,
    }
    if seq_length:
        rates["tokens_per_sec"] = rates["samples_per_sec"] * seq_length
    ranks = groups.world_size() if world_size is None else world_size
    report: dict[str, float | int] = {f"throughput/{key}": rate for key, rate in rates.items()}
    report.update({f"throughput/device/{key}": rate / ranks for key, rate in rates.items()})
    report["throughput/micro_batch_size"] = train_config.micro_batch_size
    report["throughput/global_batch_size"] = train_config.global_batch_size
    return report
