"""Straggler detection: the parts of a step, who is slow in them, and who is told."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from mcore.observe import Outlier, StragglerDetector, StragglerReport, nvtx_range
from mcore.observe.runs import log_slow_ranks
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, SlowRank
from pretrain.watch.logs import is_writer

SECTIONS = ("forward", "backward", "optimizer")
_WORTH_A_LINE = 1.25  # times as long as the fastest rank
logger = logging.getLogger("mcore.observe.straggler")


class _LinesOnDisk(logging.FileHandler):
    """The detector's lines in a file; one warning where the disk takes no more."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._has_warned:
            self._has_warned = True
            text = f"cannot write {self.baseFilename} ({sys.exc_info()[1]})"
            print(f"pretrain: warning: {text}; training goes on", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class CpuWaits:
    """Milliseconds that this thread was ready to run and had no CPU, section by section.

    On a shared machine other processes take them, now from one rank and now from another. Read
    where Linux counts them; elsewhere, and where an accelerator does the work, always 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._waited = dict.fromkeys(SECTIONS, 0.0)
        self._file = -1
        if device.type == "cpu":
            with suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """Count what is waited inside."""
        before = self._so_far()
        yield
        self._waited[section] += self._so_far() - before

    def take(self) -> list[float]:
        """What was waited since the last call, in the order of ``SECTIONS``."""
        taken = list(self._waited.values())
        self._waited = dict.fromkeys(SECTIONS, 0.0)
        return taken

    def close(self) -> None:
        """Count no longer."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _so_far(self) -> float:
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e6 if self._file >= 0 else 0.0


class StepRanges:
    """Context managers around the parts of a step.

    Nothing in a part waits for another rank, except what tensor- and context-parallel layers,
    experts and FSDP wait for inside it.

    The forward of a slow rank takes ``factor`` times as long as the longest of all ranks, pass by
    pass, so that it stands out on a busy machine too; in a pipeline, whose ranks are not in the
    same pass, as long as its own.
    """

    def __init__(
        self,
        detector: StragglerDetector,
        slow: SlowRank | None,
        device: torch.device,
        *,
        in_step: bool = True,
        waits: CpuWaits | None = None,
    ) -> None:
        self._detector = detector
        self._waits = waits or CpuWaits(torch.device("meta"))
        self._slow = slow
        self._in_step = in_step
        self._device = device

    @contextmanager
    def data(self) -> Iterator[None]:
        """Making the batch."""
        with nvtx_range("data"), self._detector(bdata=True):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model and its loss: what the detector calls compute, and a section of its own."""
        if self._slow is None:
            with self._detector, self._section("forward"):
                yield
            return
        is_slow = dist.get_rank() == self._slow.rank
        with self._detector, self._section("forward"):
            began = self._now()
            yield
            took = self._now() - began
            if is_slow and not self._in_step:
                time.sleep((self._slow.factor - 1.0) * took)
            elif is_slow:
                end = began + self._slow.factor * self._longest(took)
                time.sleep(max(0.0, end - self._now()))
        if not self._in_step:
            return
        if not is_slow:
            self._longest(took)
        dist.barrier()  # or the others would wait for the slow rank inside their next part

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Gradients of this rank."""
        with self._section("backward"):
            yield

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """The update of the weights."""
        with self._section("optimizer"):
            yield

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        with nvtx_range(name), self._waits.during(name), self._detector.section(name):
            yield

    def _longest(self, seconds: float) -> float:
        """The longest time of all ranks; one all-reduce over the world."""
        longest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


def times_the_fastest(
    found: StragglerReport, one: Outlier, *, stages: int = 1, waited_ms: float = 0.0
) -> float:
    """A rank's time in its section, less what waits for a CPU took, over that of the fastest rank.

    Both are of one pipeline stage.
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
    """The detector of a run; all ranks make it and call ``report`` together.

    While ``is_starting`` on any rank, which then has other work than its steps, none is named.
    """

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        device: torch.device,
        flops_per_step: int,
        is_starting: Callable[[], bool] = lambda: False,
    ) -> None:
        StragglerDetector.reset_singleton()
        self.detector = StragglerDetector()
        self.reports = 0
        self.named: Counter[int] = Counter()
        self._folder = folder
        self._flops_per_step = flops_per_step
        self._stages = settings.pp
        # Ranks that wait for each other inside a section: neighbours.
        self._coupled = settings.tp * settings.cp
        if settings.fsdp or settings.ep > 1:
            self._coupled = settings.world_size // settings.pp
        self._tokens_per_step = settings.global_batch_size * settings.seq_length
        self._steps = 0
        self.waits = CpuWaits(device)
        self._device = device
        self._is_starting = is_starting
        self._all_started = False  # all ranks alike
        self._has_reported = False
        self._handler: logging.Handler | None = None
        if settings.straggler:
            self._start(settings, device)
            self._all_started = not self._gather()[:, 0].any()

    def _start(self, settings: Settings, device: torch.device) -> None:
        rank = dist.get_rank()
        if rank == 0:
            self._write_lines()
        self.detector.configure(
            dist.get_world_size(),
            rank,
            port=settings.straggler_port,
            enabled=True,
            device=device,
            sections=SECTIONS,
        )
        if self.detector.controller_error is not None:
            print(
                f"straggler detector: port {settings.straggler_port} cannot be used "
                f"({self.detector.controller_error.strerror}); the detector works without it",
                flush=True,
            )
        elif self.detector.controller_address is not None:
            host, port = self.detector.controller_address
            print(f"straggler detector: http://{host}:{port}/ui", flush=True)

    def _write_lines(self) -> None:
        """Send every line of the detector to the file; the console gets the slow ranks."""
        self._handler = _LinesOnDisk(self._folder.straggler_log)
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)

    def end_step(self) -> None:
        """Call after every step; no communication."""
        self._steps += 1

    def show(self, loss_name: str, loss: torch.Tensor, norm: torch.Tensor, seconds: float) -> None:
        """Put what a step reached on the detector's page; reads the device on rank 0."""
        if self.detector.configured and dist.get_rank() == 0:
            numbers = {loss_name: loss.item(), "grad norm": norm.item()}
            self.detector.show(**numbers, **{"tokens/s": self._tokens_per_step / seconds})

    def report(self, step: int) -> dict[str, float]:
        """Compare the ranks since the last report; an all-gather and an all-reduce over the world.

        Slow ranks are named on the console and noted for the run page. Returned for the trackers,
        equal on all ranks: each rank's speed relative to the fastest one, the time of its forward
        passes in a step, and its longest wait for data.
        """
        steps, self._steps = self._steps, 0
        waited = self.waits.take()
        if not self.detector.configured or not steps:
            return {}
        before = self.detector.last_report
        self.detector.report(float(self._flops_per_step * steps), steps)
        found = self.detector.last_report
        if found is None or found is before:  # it is switched off
            return {}
        self._has_reported = True
        rows = self._gather(*waited)
        if self._all_started:
            self._name_slow_ranks(found, step, self._felt(rows[:, 1:]))
        self._all_started = not rows[:, 0].any()
        columns = {
            "relative-score": found.relative_scores["compute"],
            "forward-ms": found.metrics["elapsed_ms"],
            "data-ms": found.metrics["data_ms"],
        }
        return {
            f"straggler/rank{rank}/{name}": values[rank]
            for rank in range(found.world_size)
            for name, values in columns.items()
        }

    def _gather(self, *waited: float) -> torch.Tensor:
        """Of each rank a row: whether it is starting, then ``waited``; one all-reduce."""
        rows = torch.zeros(dist.get_world_size(), 1 + len(waited), device=self._device)
        rows[dist.get_rank()] = torch.tensor([float(self._is_starting()), *waited])
        dist.all_reduce(rows)
        return rows.cpu()

    def _felt(self, waited: torch.Tensor) -> list[list[float]]:
        """What each rank may have lost by its own waits and those of whom it waits for inside."""
        size = self._coupled
        felt = waited.view(-1, size, len(SECTIONS)).sum(1).repeat_interleave(size, 0)
        kept: list[list[float]] = felt.tolist()
        return kept

    def _name_slow_ranks(
        self, found: StragglerReport, step: int, waited: list[list[float]]
    ) -> None:
        self.reports += 1
        slow = {}
        for one in found.stragglers:
            if one.metric in SECTIONS:
                waited_ms = waited[one.rank][SECTIONS.index(one.metric)]
                times = times_the_fastest(found, one, stages=self._stages, waited_ms=waited_ms)
                if times >= _WORTH_A_LINE:
                    slow[one.rank, one.metric] = times
        self.named.update({rank for rank, _ in slow})
        if is_writer() and self._folder.path.is_dir():  # which this would make again
            named = [
                replace(one, score=1 / slow[one.rank, one.metric])
                for one in found.stragglers
                if (one.rank, one.metric) in slow
            ]
            log_slow_ranks(self._folder.path, step, named)
        if dist.get_rank() == 0:
            for (rank, section), times in slow.items():
                print(
                    f"straggler: rank {rank} takes {times:.1f} times as long as the fastest rank "
                    f"{'of its stage ' if self._stages > 1 else ''}for its {section}",
                    flush=True,
                )

    def summary(self) -> str | None:
        """Which ranks were named how often, or None without a report."""
        if not self._has_reported:
            return None
        reports = f"{self.reports} report{'s' * (self.reports != 1)} ({self._folder.straggler_log})"
        if not self.named:
            return f"none in {reports}"
        named = ", ".join(f"rank {rank} in {count}" for rank, count in sorted(self.named.items()))
        return f"{named} of {reports}"

    def close(self) -> None:
        """Stop listening and writing; all ranks call it."""
        StragglerDetector.reset_singleton()
        self.waits.close()
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler.close()
            self._handler = None
