"""Reports on a run: memory, energy, elapsed and remaining time, throughput."""

from __future__ import annotations

import functools
import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore.observe.extras import require_extra
from mcore.observe.files import replacing
from mcore.observe.rank_logging import warn_once
from mcore.parallel import groups
from mcore.parallel.groups import comm_device
from mcore.parallel.torch_compat import is_distributed
from mcore.versioning.process_rank import process_rank

logger = logging.getLogger(__name__)

_WITHOUT_CUDA = "record_memory_history needs CUDA, which is not available; nothing is recorded"

_MAX_EVENTS = 100_000

# Statistic of torch's allocator -> reported name. "mem-alloc-retires" is Megatron-LM's spelling,
# which existing dashboards use.
MEMORY_KEYS: dict[str, str] = {
    "allocated_bytes.all.current": "mem-allocated-bytes",
    "active_bytes.all.current": "mem-active-bytes",
    "inactive_split_bytes.all.current": "mem-inactive-bytes",
    "reserved_bytes.all.current": "mem-reserved-bytes",
    "allocated_bytes.all.peak": "mem-max-allocated-bytes",
    "active_bytes.all.peak": "mem-max-active-bytes",
    "inactive_split_bytes.all.peak": "mem-max-inactive-bytes",
    "reserved_bytes.all.peak": "mem-max-reserved-bytes",
    "num_alloc_retries": "mem-alloc-retires",
    "allocation.all.current": "mem-allocated-count",
}

# The names in Megatron-Bridge's documentation, to pass as ``memory_keys``.
MEMORY_KEYS_TABLE: dict[str, str] = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}

_HOST_KEYS = {
    "host_rss_bytes.current": "mem-host-rss-bytes",
    "host_rss_bytes.peak": "mem-max-host-rss-bytes",
}


def report_memory(
    memory_keys: Mapping[str, str] | None, *, reset_peak: bool = False
) -> dict[str, float | int]:
    """Report memory statistics of this rank's accelerator.

    Statistics in bytes are reported in gigabytes (1e9 bytes) with five significant digits, and
    ``bytes`` in the reported name becomes ``gigabytes``. Counts stay ints. No communication.

    Args:
        memory_keys: Statistics of ``torch.accelerator.memory_stats()``, each with the name to
            report it under. None or empty means :data:`MEMORY_KEYS`.
        reset_peak: Restart the peaks after reading them. Otherwise they count from the start of
            the process.

    Returns:
        Values by name in the order of the keys, without statistics that do not exist. Without an
        accelerator it is empty, or for None the resident memory of the process:
        ``mem-host-rss-gigabytes`` and ``mem-max-host-rss-gigabytes``.

    Example:
        >>> all(value >= 0 for value in report_memory(None).values())
        True
    """
    if not torch.accelerator.is_available():
        return _name_stats(_read_host(), _HOST_KEYS) if memory_keys is None else {}
    report = _name_stats(torch.accelerator.memory_stats(), memory_keys or MEMORY_KEYS)
    if reset_peak:
        torch.accelerator.reset_peak_memory_stats()
    return report


def _name_stats(stats: Mapping[str, int], memory_keys: Mapping[str, str]) -> dict[str, float | int]:
    """Return statistics under their names, bytes in gigabytes."""
    report: dict[str, float | int] = {}
    for key, name in memory_keys.items():
        if key not in stats:
            continue
        if "bytes" in key:
            report[name.replace("bytes", "gigabytes")] = float(f"{stats[key] / 1e9:.5g}")
        else:
            report[name] = stats[key]
    return report


def _read_host() -> dict[str, int]:
    stats: dict[str, int] = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        stats["host_rss_bytes.current"] = int(statm.read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        stats["host_rss_bytes.peak"] = max(peak, stats.get("host_rss_bytes.current", 0))
    return stats


def start_memory_history_recording(profiling: Any) -> None:
    """Make the CUDA allocator record its history, and save a snapshot when memory runs out.

    Call it before the model is built, to trace every allocation to the code. Up to 100 000 events
    are kept, with Python stacks. A failing allocation saves ``{base}_oom_rank-{rank}{extension}``
    next to the configured path. A second call does nothing. Without CUDA it only logs one warning.
    No communication.

    Args:
        profiling: :class:`mcore.observe.ProfilingConfig`, an object with its
            ``record_memory_history``, ``profile_ranks`` and ``memory_snapshot_path``, or None.

    Example:
        >>> start_memory_history_recording(None)
    """
    if _is_recording_rank(profiling):
        _start_recording(profiling.memory_snapshot_path, process_rank())


def save_snapshot_at_profile_end(profiling: Any, iteration: int) -> None:
    """Save ``{base}_{rank}{extension}`` if this is the last step of the profile on this rank.

    A failure is a warning, never an exception. No communication.
    """
    if profiling is None or getattr(profiling, "profile_step_end", None) != iteration:
        return
    if not _is_recording_rank(profiling):
        return
    if not torch.cuda.is_available():
        warn_once(logger, _WITHOUT_CUDA)
        return
    path = snapshot_path(profiling.memory_snapshot_path, f"_{process_rank()}")
    try:
        _save_snapshot(path)
    except Exception as error:
        logger.warning(
            "could not save a memory snapshot to %s: %s: %s", path, type(error).__name__, error
        )
        return
    if process_rank() == 0:
        print(f"Saved memory snapshot to {path}", flush=True)  # noqa: T201


def snapshot_path(configured: str, suffix: str) -> str:
    """Put a suffix between the base and the extension of a path."""
    base, extension = os.path.splitext(configured)
    return f"{base}{suffix}{extension}"


def _is_recording_rank(profiling: Any) -> bool:
    if profiling is None or not getattr(profiling, "record_memory_history", False):
        return False
    return process_rank() in profiling.profile_ranks


@functools.cache  # one observer for each process, however often recording is started
def _start_recording(configured: str, rank: int) -> None:
    if not torch.cuda.is_available():
        warn_once(logger, _WITHOUT_CUDA)
        return
    torch.cuda.memory._record_memory_history(
        enabled="all", context="all", stacks="python", max_entries=_MAX_EVENTS
    )
    path = snapshot_path(configured, f"_oom_rank-{rank}")
    cuda: Any = torch._C  # CPU builds, and so the type stubs, lack the name
    cuda._cuda_attach_out_of_memory_observer(functools.partial(_save_after_failure, path))
    if rank == 0:
        logger.info(
            "rank %d records its memory history and saves %s if memory runs out", rank, path
        )


def _save_after_failure(path: str, *details: Any) -> None:
    try:  # this runs inside a failing allocation: no exception may replace torch's own error
        _save_snapshot(path)
        logger.error("out of memory: saved a snapshot to %s", path)
    except Exception:
        logger.exception("out of memory, and could not save a snapshot to %s", path)


def _save_snapshot(path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)


def _open_nvml_reader() -> Callable[[], int]:
    nvml, handle = open_device_handle()
    return lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


class EnergyMonitor:
    """Reads the energy counter of each rank's GPU and sums it over the job.

    Every rank is part of every sum. If a rank cannot read its GPU, the sum is NaN.

    Args:
        read_mj: Returns the energy in millijoules that this rank's device has used so far. None
            reads the current GPU through NVML.

    Example:
        >>> counter = iter([1000, 3500])
        >>> monitor = EnergyMonitor(lambda: next(counter))
        >>> monitor.setup()
        >>> monitor.lap()
        2.5
    """

    def __init__(self, read_mj: Callable[[], int] | None = None) -> None:
        self._read_mj = read_mj
        self._is_running = False
        self._mark_mj: int | None = None  # the counter at the last start or reading
        self._kept_mj = 0  # energy since the last lap, up to the mark
        self._is_known = True  # no reading since the last lap failed
        self._total_j = 0.0

    def setup(self) -> None:
        """Open the sensor and start counting. A failing sensor logs one warning. Never waits."""
        if self._read_mj is None:
            try:
                self._read_mj = _open_nvml_reader()
            except Exception as error:
                _warn_of_energy(error)
        self.resume()

    def resume(self) -> None:
        """Start counting. No effect while counting."""
        if not self._is_running:
            self._is_running = True
            self._mark_mj = self._read_counter()

    def pause(self) -> None:
        """Stop counting, for example during validation. No effect while stopped."""
        if self._is_running:
            self._keep_stretch()
            self._is_running = False

    def lap(self) -> float:
        """Return the energy of all ranks since the last lap.

        One all-reduce of two int64 over the world group. All ranks call it and get the sum.

        Returns:
            Joules, or NaN if a rank could not read its device.
        """
        if self._is_running:
            self._keep_stretch()
        millijoules, unknown = self._kept_mj, int(not self._is_known)
        if is_distributed():
            device = comm_device(dist.group.WORLD)
            # Integers: a float32 sum over many ranks would lose millijoules.
            sums = torch.tensor([millijoules, unknown], dtype=torch.int64, device=device)
            dist.all_reduce(sums)
            millijoules, unknown = sums.tolist()
        joules = math.nan if unknown else millijoules / 1000
        self._kept_mj = 0
        self._is_known = True
        self._total_j += joules
        return joules

    def get_total(self) -> float:
        """Return the energy of all ranks over all laps, in joules. No communication."""
        return self._total_j

    def shutdown(self) -> None:
        """Stop counting and release the sensor. A second call does nothing."""
        self._is_running = False
        self._read_mj = None

    def _keep_stretch(self) -> None:
        now = self._read_counter()
        if now is None or self._mark_mj is None:
            self._is_known = False
        else:
            self._kept_mj += now - self._mark_mj
        self._mark_mj = now

    def _read_counter(self) -> int | None:
        if self._read_mj is None:
            return None
        try:
            return self._read_mj()
        except Exception as error:
            _warn_of_energy(error)
            self._read_mj = None
            return None


def _warn_of_energy(error: Exception) -> None:
    logger.warning("energy is unknown on this rank: %s: %s", type(error).__name__, error)


def open_device_handle(index: int | None = None) -> tuple[Any, Any]:
    """Open NVML for a torch device and return the module and a handle; None is the current device.

    The device is found by its UUID, because the indices of NVML ignore CUDA_VISIBLE_DEVICES.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("NVML needs an NVIDIA GPU, but torch found none")
    require_extra("nvml", "reading the GPU's sensors")
    import pynvml

    pynvml.nvmlInit()
    if index is None:
        index = torch.accelerator.current_device_index()
    device = torch.cuda.get_device_properties(index)
    if " MIG " in device.name:
        raise RuntimeError(f"{device.name} is a part of a GPU, and NVML measures only whole GPUs")
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")


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
