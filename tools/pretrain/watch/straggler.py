"""Straggler detection: the sections of a step, the slow ranks in them, and their reports."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path

import torch
import torch.distributed as dist

from mcore.observe import Outlier, StragglerDetector, StragglerReport, nvtx_range
from mcore.observe.files import open_plain
from mcore.observe.runs import log_slow_ranks
from pretrain.run.saving import attempt
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, SlowRank
from pretrain.watch.logs import is_writer

SECTIONS = ("forward", "backward", "optimizer")
_WORTH_A_LINE = 1.25  # times as long as the fastest rank
logger = logging.getLogger("mcore.observe.straggler")


class _LinesOnDisk(logging.FileHandler):
    """Writes the detector's lines to a file. The first failed write is a warning."""

    _has_warned = False

    def _open(self) -> TextIOWrapper:
        number = open_plain(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return TextIOWrapper(open(number, "ab"), encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._has_warned:
            self._has_warned = True
            text = f"cannot write {self.baseFilename} ({sys.exc_info()[1]})"
            print(f"pretrain: warning: {text}. Training continues", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class CpuWaits:
    """Milliseconds per section during which this thread was ready to run and had no CPU.

    On a shared machine other processes use the CPU and slow different ranks at different times.
    Linux reports them. On other systems and with an accelerator they are 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._waited = dict.fromkeys(SECTIONS, 0.0)
        self._file = -1
        if device.type == "cpu":
            with suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """Add the waiting time of the block to a section."""
        before = self._read_wait()
        yield
        self._waited[section] += self._read_wait() - before

    def take(self) -> list[float]:
        """Return the waiting times since the last call, in the order of ``SECTIONS``."""
        taken = list(self._waited.values())
        self._waited = dict.fromkeys(SECTIONS, 0.0)
        return taken

    def close(self) -> None:
        """Stop counting."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _read_wait(self) -> float:
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e6 if self._file >= 0 else 0.0


@dataclass(eq=False)
class StepRanges:
    """Context managers around the parts of a step.

    A part waits for other ranks only inside tensor- and context-parallel layers, experts and FSDP.

    The forward pass of a slow rank lasts ``factor`` times the longest pass of all ranks, to be
    visible on a busy machine too. In a pipeline the ranks run different passes, so ``factor``
    multiplies the rank's pass.
    """

    detector: StragglerDetector
    slow: SlowRank | None
    device: torch.device
    in_step: bool = True
    waits: CpuWaits | None = None

    @contextmanager
    def data(self) -> Iterator[None]:
        """Preparing the batch."""
        with nvtx_range("data"), self.detector(bdata=True):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model and its loss: the detector's ``compute`` time and the section ``forward``."""
        if self.slow is None:
            with self.detector, self._time_section("forward"):
                yield
            return
        is_slow = dist.get_rank() == self.slow.rank
        with self.detector, self._time_section("forward"):
            began = self._read_clock()
            yield
            took = self._read_clock() - began
            if is_slow and not self.in_step:
                time.sleep((self.slow.factor - 1.0) * took)
            elif is_slow:
                end = began + self.slow.factor * self._find_longest(took)
                time.sleep(max(0.0, end - self._read_clock()))
        if not self.in_step:
            return
        if not is_slow:
            self._find_longest(took)
        dist.barrier()  # else the others would wait for the slow rank inside their next section

    def backward(self) -> AbstractContextManager[None]:
        """Gradients of this rank."""
        return self._time_section("backward")

    def optimizer(self) -> AbstractContextManager[None]:
        """The update of the weights."""
        return self._time_section("optimizer")

    @contextmanager
    def _time_section(self, name: str) -> Iterator[None]:
        waits = nullcontext() if self.waits is None else self.waits.during(name)
        with nvtx_range(name), waits, self.detector.section(name):
            yield

    def _find_longest(self, seconds: float) -> float:
        """The longest time of all ranks. One all-reduce over the world."""
        longest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def _read_clock(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def times_the_fastest(
    found: StragglerReport, one: Outlier, *, stages: int = 1, waited_ms: float = 0.0
) -> float:
    """A rank's time in its section without waits for a CPU, divided by the fastest rank's time.

    Compares ranks of one pipeline stage.
    """
    per_stage = found.world_size // stages
    times = {
        rank: of_rank.sum_ms
        for rank, of_rank in zip(found.ranks, found.sections[one.metric], strict=True)
        if rank // per_stage == one.rank // per_stage
    }
    fastest = min(times.values())
    return (times[one.rank] - waited_ms) / fastest if fastest > 0 else 1.0


class StragglerWatch:
    """The detector of a run. All ranks create it and call ``report`` together.

    While ``is_starting`` is true on any rank, that rank has other work, and no rank is reported.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, device: torch.device, flops_per_step: int,
        is_starting: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        StragglerDetector.reset_singleton()
        self.detector = StragglerDetector()
        self.reports = self._steps = 0
        self.named: Counter[int] = Counter()
        self._folder, self._device, self._is_starting = folder, device, is_starting
        self._flops_per_step = flops_per_step
        self._stages = settings.pp
        # Ranks that wait for each other inside a section: neighbours.
        is_wide = settings.fsdp or settings.ep > 1
        self._coupled = settings.world_size // settings.pp if is_wide else settings.tp * settings.cp
        self._tokens_per_step = settings.global_batch_size * settings.seq_length
        self.waits = CpuWaits(device)
        self._all_started = False  # equal on all ranks
        self._has_reported = False
        self._handler: logging.Handler | None = None
        if settings.straggler:
            self._start(settings, device)
            self._all_started = not self._gather()[:, 0].any()

    def _start(self, settings: Settings, device: torch.device) -> None:
        rank = dist.get_rank()
        if rank == 0:
            attempt(self._write_lines, f"write {self._folder.straggler_log}")
        self.detector.configure(
            dist.get_world_size(), rank, port=settings.straggler_port, enabled=True, device=device,
            sections=SECTIONS,
            peers=f"stage {rank // (settings.world_size // settings.pp)}",
        )  # fmt: skip
        if self.detector.controller_error is not None:
            problem = f"cannot be used ({self.detector.controller_error.strerror})"
            text = f"port {settings.straggler_port} {problem}. The detector works without it"
            print(f"straggler detector: {text}", flush=True)
        elif self.detector.controller_address is not None:
            host, port = self.detector.controller_address
            print(f"straggler detector: http://{host}:{port}/ui", flush=True)

    def _write_lines(self) -> None:
        """Write every line of the detector to the file. The console shows only slow ranks."""
        self._handler = _LinesOnDisk(self._folder.straggler_log)
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)

    def end_step(self) -> None:
        """Call after every step. No communication."""
        self._steps += 1

    def show(self, loss_name: str, loss: torch.Tensor, norm: torch.Tensor, seconds: float) -> None:
        """Show the results of a step on the detector's page. Rank 0 waits for the device."""
        if self.detector.configured and dist.get_rank() == 0:
            numbers = {loss_name: loss.item(), "grad norm": norm.item()}
            self.detector.show(**numbers, **{"tokens/s": self._tokens_per_step / seconds})

    def report(self, step: int) -> dict[str, float]:
        """Compare the ranks since the last report. An all-gather and an all-reduce over the world.

        Prints slow ranks and records them for the run page. Returns metrics for the trackers, equal
        on all ranks: each rank's speed relative to the fastest rank, its forward time per step in
        ms, and its longest wait for data in ms.
        """
        steps, self._steps = self._steps, 0
        waited = self.waits.take()
        if not self.detector.configured or not steps:
            return {}
        before = self.detector.last_report
        self.detector.report(float(self._flops_per_step * steps), steps)
        report = self.detector.last_report
        if report is None or report is before:  # the detector is switched off
            return {}
        self._has_reported = True
        rows = self._gather(*waited)
        if self._all_started:
            # The waits that may have slowed each rank: its waits and those of its coupled ranks.
            waits = rows[:, 1:].view(-1, self._coupled, len(SECTIONS)).sum(1)
            self._report_slow_ranks(report, step, waits.repeat_interleave(self._coupled, 0))
        self._all_started = not rows[:, 0].any()
        columns = {
            "relative-score": report.relative_scores["compute"],
            "forward-ms": report.metrics["elapsed_ms"],
            "data-ms": report.metrics["data_ms"],
        }
        return {
            f"straggler/rank{rank}/{name}": values[rank]
            for rank in range(report.world_size)
            for name, values in columns.items()
        }

    def _gather(self, *waited: float) -> torch.Tensor:
        """A row per rank: whether it is starting, then its ``waited``. One all-reduce."""
        rows = torch.zeros(dist.get_world_size(), 1 + len(waited), device=self._device)
        rows[dist.get_rank()] = torch.tensor([float(self._is_starting()), *waited])
        dist.all_reduce(rows)
        return rows.cpu()

    def _report_slow_ranks(self, report: StragglerReport, step: int, waited: torch.Tensor) -> None:
        self.reports += 1
        slow: dict[Outlier, float] = {}
        for one in report.stragglers:
            if one.metric in SECTIONS:
                waited_ms = float(waited[one.rank, SECTIONS.index(one.metric)])
                times = times_the_fastest(report, one, stages=self._stages, waited_ms=waited_ms)
                if times >= _WORTH_A_LINE:
                    slow[one] = times
        self.named.update({one.rank for one in slow})
        if is_writer() and self._folder.path.is_dir():  # writing would create a deleted folder
            named = [replace(one, score=1 / times) for one, times in slow.items()]
            log_slow_ranks(self._folder.path, step, named)
        among = "fastest rank of its stage" if self._stages > 1 else "fastest rank"
        for one, times in slow.items() if dist.get_rank() == 0 else ():
            line = f"rank {one.rank} takes {times:.1f} times as long as the {among}"
            print(f"straggler: {line} for its {one.metric}", flush=True)

    def summary(self) -> str | None:
        """How often each rank was reported, or None without a report."""
        if not self._has_reported:
            return None
        reports = f"{self.reports} report{'s' * (self.reports != 1)} ({self._folder.straggler_log})"
        if not self.named:
            return f"none in {reports}"
        named = ", ".join(f"rank {rank} in {count}" for rank, count in sorted(self.named.items()))
        return f"{named} of {reports}"

    def close(self) -> None:
        """Stop listening and writing. All ranks call it."""
        StragglerDetector.reset_singleton()
        self.waits.close()
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler.close()
            self._handler = None
