"""The detector of slow ranks, which shows whether the GPU or data loading is the cause."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar

import torch

from mcore.observe.straggler.comparison import RankComparison
from mcore.observe.straggler.detector_settings import DetectorSettings, OnStraggler
from mcore.observe.straggler.exchange import UNKNOWN_METRICS, Exchange, GatheredRows
from mcore.observe.straggler.outliers import outlier_lines
from mcore.observe.straggler.ranges import (
    COMPUTE_KIND,
    DATA_KIND,
    NUM_KEPT,
    UNTIMED,
    Entry,
    HostRanges,
    ThreadRanges,
)
from mcore.observe.straggler.report import StragglerReport, _StragglerData
from mcore.observe.straggler.reporter import Pace, Reporter
from mcore.observe.straggler.routes import ControllerState
from mcore.observe.straggler.sections import (
    SectionTimers,
    checked_sections,
    replace_callables,
    timed_calls,
)
from mcore.parallel.groups import GroupLike

if TYPE_CHECKING:
    from mcore.observe.straggler.controller import Listener

logger = logging.getLogger("mcore.observe.straggler")

_P = ParamSpec("_P")
_R = TypeVar("_R")


class StragglerFoundError(RuntimeError):
    """What :meth:`StragglerDetector.report` raises on all ranks with ``on_straggler="stop"``."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


class StragglerDetector:
    """Times chosen ranges on every rank and compares the ranks at each log interval.

    There is one per process: constructing it again gives the same object, unchanged. It does
    nothing until :meth:`configure`, which every rank of the group calls, like every
    :meth:`report`. ``with detector:`` times a range of compute, ``with detector(bdata=True):`` a
    fetch of data, ``with detector.section(name):`` a named section; ranges nest, and each thread
    has its own. Single kernels inside a range, as CUPTI times them, are not timed.

    A collective inside a range makes all ranks wait for the slowest, and hides who that is: put
    sections around the compute before it, and they are judged each by itself.

    On an accelerator a compute range lasts as long as the device took between two events on the
    current stream, or the host if that took longer; only a report waits. On the CPU and for
    data ranges the host's clock counts alone. Ranges in a graph capture are skipped and counted.

    Attributes:
        world: The number of ranks; 0 before ``configure``.
        rank: This rank.
        mmcnt: How many ranks the report lists at each end of the throughput.
        amp: How many times longer a step takes than what is timed of it.
        port: The port requested for the controller.
        dev: The device of the collective: the CPU for gloo.
        start: Open a range while on, else do nothing.
        stop: Close it while on, else do nothing.

    Example:
        >>> StragglerDetector.reset_singleton()
        >>> detector = StragglerDetector()
        >>> detector.configure(world=1, rank=0, enabled=True, controller=False)
        >>> with detector:
        ...     total = sum(range(1000))
        >>> detector.report(total_flops=1e6, log_interval=1)
        True
        >>> detector.last_report.sections["compute"][0].count
        1
        >>> StragglerDetector.reset_singleton()
    """

    _configured: ClassVar[bool] = False
    _instance: ClassVar[StragglerDetector | None] = None
    _is_made: bool
    _off: bool
    _idle: bool  # off, and no range is open
    _begin: Callable[[ThreadRanges, int], Entry] | None  # None: only read the host's clock
    _reporter: Reporter | None
    _timers: SectionTimers | None
    _listener: Listener | None
    _pace: Pace
    _on_straggler: OnStraggler

    def __new__(cls) -> StragglerDetector:
        """Return the one instance, made at the first call."""
        if StragglerDetector._instance is None:
            instance = super().__new__(cls)
            instance._is_made = False
            StragglerDetector._instance = instance
        return StragglerDetector._instance

    def __init__(self) -> None:
        if self._is_made:
            return
        self._is_made = True
        self._use_ranges(HostRanges())
        self._forget_settings()

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
        *,
        group: GroupLike | None = None,
        device: torch.device | str | None = None,
        sections: Sequence[str] = (),
        sample_every: int = 1,
        bind: str = "127.0.0.1",
        token: str | None = None,
        controller: bool = True,
        allow_get_toggle: bool = False,
        z_threshold: float = 3.3,
        relative_threshold: float = 1.0,
        individual_threshold: float = 0.75,
        telemetry: Callable[[], Sequence[float]] | None = None,
        report_every_s: float = 300.0,
        on_straggler: OnStraggler = "log",
    ) -> None:
        """Make the detector ready; a second call does nothing.

        Every rank of the group calls it with the same ``sections`` and ``enabled``. No collective.

        Args:
            world: The number of ranks of the group.
            rank: This rank, from 0 to ``world - 1``; each once. Rank 0 logs and decides.
            mmcnt: How many ranks with the lowest and the highest throughput to list; below 1 is 1.
            amp: How many times longer a step takes than what is timed of it: 3.0 where only the
                forward pass is.
            port: Where rank 0 listens for requests; 0 takes a free one.
            prefill: How many events to make when timing is first switched on.
            enabled: Time ranges from the start.
            group: The ranks that report together; None is the whole job.
            device: The computing device; None is the accelerator, or the CPU without one.
            sections: Names for :meth:`section` that all ranks know; at most 64.
            sample_every: Time only every Nth range of a kind; sums are multiplied by N.
            bind: The address that rank 0 listens on.
            token: What requests must present; None reads ``MCORE_STRAGGLER_TOKEN``.
            controller: Whether to listen for requests.
            allow_get_toggle: ``GET /`` toggles, as with Megatron-LM.
            z_threshold: How many standard deviations a rank stands out; raised with the number of
                ranks and sections, so that a report of equal ranks is as rarely wrong.
            relative_threshold: The fastest ranks' time over the rank's own has to be below it too.
            individual_threshold: A rank that is slower than it was by this score stands out.
            telemetry: Returns temperature (C), power (W), utilisation (%) and clock (MHz); None
                asks NVML, or amdsmi through torch.
            report_every_s: About how often :meth:`report_if_due` reports, in seconds.
            on_straggler: What a report with ``stragglers`` does besides a warning on rank 0:
                nothing, :class:`StragglerFoundError` on every rank, or a call with the report on
                every rank.

        Raises:
            ValueError: An impossible value, a ``world`` that is not the size of the group, or a
                ``bind`` that other machines reach without a token. Nothing changes then.
            RuntimeError: :meth:`reset_singleton` has replaced this object.
        """
        if self.configured:
            logger.debug("the straggler detector is already configured; nothing was changed")
            return
        if StragglerDetector._instance is not self:
            raise RuntimeError("this straggler detector was replaced; use StragglerDetector()")
        self._set_up(
            DetectorSettings(
                world=world,
                rank=rank,
                mmcnt=mmcnt,
                amp=amp,
                port=port,
                prefill=prefill,
                enabled=enabled,
                group=group,
                device=device,
                sections=sections,
                sample_every=sample_every,
                bind=bind,
                token=token,
                controller=controller,
                allow_get_toggle=allow_get_toggle,
                z_threshold=z_threshold,
                relative_threshold=relative_threshold,
                individual_threshold=individual_threshold,
                telemetry=telemetry,
                report_every_s=report_every_s,
                on_straggler=on_straggler,
            )
        )

    def _set_up(self, settings: DetectorSettings) -> None:
        """Take settings; nothing changes where they turn out to be impossible."""
        names = checked_sections(settings.sections)
        listener = settings.make_listener()
        exchange = Exchange(settings.group, world=settings.world, computing=settings.device)
        ranges = settings.make_ranges()
        self.world, self.rank, self.dev = settings.world, settings.rank, exchange.device
        self.mmcnt, self.amp, self.port = settings.mmcnt, settings.amp, settings.port
        self._reporter = settings.make_reporter(exchange, names)
        self._timers = SectionTimers(self, names)
        self._pace, self._on_straggler = Pace(settings.report_every_s), settings.on_straggler
        self._state = ControllerState(
            rank=settings.rank, world_size=settings.world, enabled=settings.enabled
        )
        self._use_ranges(ranges)
        self._set_enabled(settings.enabled)
        StragglerDetector._configured = True
        self._listener = listener
        self._controller()

    @property
    def enabled(self) -> bool:
        """Whether ranges are timed now; a requested change takes effect at the end of a report."""
        return not self._off

    @property
    def configured(self) -> bool:
        """Whether :meth:`configure` was called and succeeded."""
        return StragglerDetector._configured and StragglerDetector._instance is self

    @property
    def my_rank(self) -> int:
        """The rank given to :meth:`configure`."""
        return self.rank

    @property
    def world_size(self) -> int:
        """The number of ranks given to :meth:`configure`; 0 before."""
        return self.world

    @property
    def bdata(self) -> bool:
        """Whether this thread's next range is a data range."""
        return self._local.ranges.mark == DATA_KIND

    @property
    def toggle(self) -> bool:
        """Whether the next report will switch timing on or off, as far as this rank knows."""
        return self._state.status().pending is not None

    @property
    def last_report(self) -> StragglerReport | None:
        """What the last :meth:`report` found out, on every rank; None before the first."""
        return self._state.last_report

    @property
    def controller_address(self) -> tuple[str, int] | None:
        """Host and port that this process listens on; None where it does not."""
        return None if self._listener is None else self._listener.address

    @property
    def controller_error(self) -> OSError | None:
        """Why the controller could not listen; None where it does or was not asked to."""
        return None if self._listener is None else self._listener.error

    @property
    def dropped(self) -> int:
        """Ranges timed by the host's clock alone, because all events were in use."""
        return self._ranges.dropped

    @property
    def skipped_capture(self) -> int:
        """Ranges that were not timed, because a graph was being captured."""
        return self._ranges.skipped_capture

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Choose what this thread's next range is.

        Args:
            bdata: True for a data range, which is timed by the host's clock alone.

        Returns:
            The instance.
        """
        if not self._idle:
            self._local.ranges.mark = DATA_KIND if bdata else COMPUTE_KIND
        return self

    def __enter__(self) -> StragglerDetector:
        """Open a range while on. Never waits.

        Returns:
            The instance.
        """
        # This and __exit__ are what training pays for, so the common case is written out here.
        if self._idle:
            return self
        ranges = self._local.ranges
        if ranges.mark or self._begin is not None:
            kind, ranges.mark = ranges.mark, COMPUTE_KIND
            self._push(ranges, kind)
        else:
            ranges.stack.append(self._now_ns())
        return self

    def __exit__(
        self,
        ex_type: type[BaseException] | None,
        ex_val: BaseException | None,
        ex_tb: TracebackType | None,
    ) -> Literal[False]:
        """Close the range; one that an exception leaves is dropped.

        Args:
            ex_type: Of the exception, or None.
            ex_val: The exception, or None.
            ex_tb: Its traceback, or None.

        Returns:
            False: the exception propagates.
        """
        if self._idle:
            return False
        ended_ns = self._now_ns()
        ranges = self._local.ranges
        try:
            opened = ranges.stack.pop()
        except IndexError:  # not opened, or while timing was off
            return False
        # isinstance would make a range 6 % slower.
        if type(opened) is int and ex_type is None:
            pending = ranges.compute
            pending.append(ended_ns - opened)
            if len(pending) >= NUM_KEPT:
                self._ranges.fold(COMPUTE_KIND, pending)
        elif type(opened) is tuple and opened is not UNTIMED:
            kind, began_ns, events = opened
            if ex_type is not None:
                self._ranges.drop((opened,))
            elif events is None:
                self._ranges.add(ranges, kind, ended_ns - began_ns)
            else:
                self._ranges.end(ranges, opened, ended_ns)
        if self._off:
            self._settle()
        return False

    def start_method(self) -> None:
        """Open a range: of compute, or of data after ``detector(bdata=True)``. Never waits.

        Does nothing while off.
        """
        self.__enter__()

    def stop_method(self) -> None:
        """Close this thread's innermost range. Never waits.

        Does nothing while off, or without an open range.
        """
        self.__exit__(None, None, None)

    def null_method(self) -> None:
        """Do nothing: what ``start`` and ``stop`` are while off."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a with statement under a name.

        Args:
            name: One of the ``sections`` given to :meth:`configure`, which all ranks compare. Any
                other is timed for ``local_sections`` of this rank's report, with one warning.

        Returns:
            A context manager; it does nothing while off.

        Raises:
            ValueError: An empty name.
        """
        return nullcontext() if self._timers is None else self._timers[name]

    def wrap(self, fn: Callable[_P, _R], name: str) -> Callable[_P, _R]:
        """Make a function whose calls are timed as a section.

        Args:
            fn: A function.
            name: The section, as for :meth:`section`.

        Returns:
            A function with the same signature.

        Raises:
            TypeError: ``fn`` is a coroutine function or a generator: ranges follow the calls of a
                thread, which those leave before they end.
        """
        return timed_calls(self.section, fn, name)

    def wrap_callables(self, callables: Mapping[str, tuple[Any, str]]) -> Callable[[], None]:
        """Time calls of existing methods and functions as sections, where they are looked up.

        Args:
            callables: Section -> the object, class or module, and the name of its attribute.

        Returns:
            A function that puts everything back.

        Raises:
            AttributeError: No such attribute.
            TypeError: It cannot be called, or suspends: see :meth:`wrap`. Nothing is changed then.

        Example:
            >>> detector = StragglerDetector()
            >>> model = torch.nn.Linear(2, 2)
            >>> undo = detector.wrap_callables({"forward": (model, "forward")})
            >>> _ = model(torch.ones(1, 2))
            >>> undo()
        """
        return replace_callables(self.wrap, callables)

    def reset(self) -> None:
        """Drop all samples; their events go back to the pool. Does nothing while off."""
        if not self._off:
            self._ranges.reset()

    def elapsed(self) -> tuple[float, float, int, int, int, int]:
        """Return what was timed since the last call or report, and start again.

        Waits for the last event on an accelerator. No communication.

        Returns:
            The sum of compute ranges (ms), the longest data range (ms), and of the GPU temperature
            (C), power (W), utilisation (%) and clock (MHz), 0 where unknown. All 0 while off.
        """
        if self._off or self._reporter is None:
            return 0.0, 0.0, 0, 0, 0, 0
        stats = self._ranges.take()
        compute, data = stats.get(COMPUTE_KIND), stats.get(DATA_KIND)
        temp, power, util, clock = (_whole(value) for value in self._reporter.telemetry())
        return (
            0.0 if compute is None else compute.sum_ms,
            0.0 if data is None else data.max_ms,
            temp,
            power,
            util,
            clock,
        )

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Compare all ranks, log it on rank 0, and switch timing on or off if that was requested.

        One all-gather of a row of float64 over the group, and one of names at the first call. Every
        rank calls it equally often and gets ``last_report``, unless rank 0 is off or gives no
        interval. No communication with one rank; while off no wait for the device either.

        Args:
            total_flops: Operations of the whole job since the last call.
            log_interval: Iterations since the last call.

        Returns:
            True on rank 0 when lines were logged: while on, with both arguments above 0.

        Raises:
            RuntimeError: On all ranks: some have other sections, or the same rank. Also when the
                collective fails, as when a rank has died or the group's timeout has expired.
            StragglerFoundError: On all ranks, with ``on_straggler="stop"``: a rank is slow.
        """
        if self._reporter is None:
            return False
        stats, metrics = {}, UNKNOWN_METRICS
        if self.enabled and log_interval > 0:
            stats = self._ranges.take()
            metrics = self._reporter.metrics_of(stats, total_flops, log_interval)
        rows = self._reporter.gather(
            enabled=self.enabled,
            wanted=self._state.wanted(),
            metrics=metrics,
            stats=stats,
            total_flops=total_flops,
            log_interval=log_interval,
            dropped=self.dropped,
            next_interval=self._pace.wanted_interval(),
        )
        self._pace.restart(rows.next_interval())
        found = None
        if rows.has_interval:
            local_sections = {} if self._timers is None else self._timers.local_stats(stats)
            found = self._reporter.compare(rows, local_sections)
        has_logged = self.rank == 0 and found is not None and self._reporter.log(found)
        self._apply(rows, found)
        if found is not None and self._on_straggler != "log" and found.stragglers:
            if self._on_straggler == "stop":
                raise StragglerFoundError(outlier_lines(found.stragglers))
            self._on_straggler(found.report)
        return has_logged

    def report_if_due(self, flops: float = 0.0) -> bool:
        """Count a step, and :meth:`report` if ``report_every_s`` seconds have passed, about.

        Every rank calls it after every step. The ranks agree on the number of steps to the next
        report with each report, without further communication; the first comes after 16 steps.

        Args:
            flops: Operations of the whole job in this step.

        Returns:
            What :meth:`report` returns; False without a report.

        Raises:
            RuntimeError: As :meth:`report`.
        """
        if self._reporter is None or not self._pace.step(flops):
            return False
        return self.report(self._pace.flops, self._pace.steps)

    def show(self, **scalars: float) -> None:
        """Show numbers of the training to who looks at the controller: loss, tokens per second.

        They stay until they are replaced. Only rank 0 listens. No communication.

        Args:
            **scalars: Numbers by name; ``show(**{"lm loss": 2.5})`` for any text.

        Raises:
            TypeError: A value is no number.
        """
        self._state.show({name: float(value) for name, value in scalars.items()})

    def close(self) -> None:
        """Stop listening, switch timing off and release the events; a second call does nothing.

        The detector stays configured and may keep calling :meth:`report`, so that other ranks do
        not wait for it; rank 0 then switches all of them off.
        """
        if self._listener is not None:
            self._listener.close()
        if self.configured:
            self._ranges.reset()
            self._ranges.free()
            self._set_enabled(False)
            self._state.request(False)
            self._state.applied(False, None)

    @classmethod
    def reset_singleton(cls) -> None:
        """Close the detector and forget it: the next ``StragglerDetector()`` is a new one.

        For tests. All ranks of a group do it, or none. ``__straggler__`` keeps the old object.
        """
        instance = StragglerDetector._instance
        if instance is not None:
            instance.close()
            instance._use_ranges(HostRanges())
            instance._forget_settings()
        StragglerDetector._instance = None
        StragglerDetector._configured = False

    def _forget_settings(self) -> None:
        """Return to the state before ``configure``."""
        self.world, self.rank, self.mmcnt, self.amp, self.port = 0, 0, 1, 3.0, 0
        self.dev = torch.device("cpu")
        self._reporter = self._timers = self._listener = None
        self._pace, self._on_straggler = Pace(math.inf), "log"
        self._state = ControllerState(rank=0, world_size=0, enabled=False)

    def _use_ranges(self, ranges: HostRanges) -> None:
        """Take the object that times ranges, and turn it off."""
        self._ranges = ranges
        self._local = ranges.local
        self._now_ns = ranges.now_ns
        self._set_enabled(False)

    def _set_enabled(self, enabled: bool) -> None:
        """Start or stop timing ranges; one that is open is still closed and kept."""
        self._off = not enabled
        self.start: Callable[[], None] = self.start_method if enabled else self.null_method
        self.stop: Callable[[], None] = self.stop_method if enabled else self.null_method
        if enabled:
            self._ranges.switched_on()
            self._begin = self._ranges.begin if self._ranges.has_begin else None
        else:
            self._begin = _untimed
            self._ranges.clear_marks()
        self._settle()

    def _settle(self) -> None:
        self._idle = self._off and not self._ranges.has_open()

    def _open(self, kind: int) -> None:
        """Open a range of a given kind, leaving the next one's mark alone."""
        if not self._idle:
            ranges = self._local.ranges
            ranges.make_room(kind)
            self._push(ranges, kind)

    def _push(self, ranges: ThreadRanges, kind: int) -> None:
        begin = self._begin
        ranges.stack.append((kind, self._now_ns(), None) if begin is None else begin(ranges, kind))

    def _apply(self, rows: GatheredRows, found: RankComparison | None) -> None:
        """Take the state that rank 0 wants; no communication."""
        if self.rank == 0 and self._reporter is not None:
            self._reporter.log_switch(rows)
        elif self.rank != 0:
            self._state.request(rows.wanted)
        if rows.wanted != self.enabled:
            self._set_enabled(rows.wanted)
        self._state.applied(rows.wanted, found)

    def _check_toggle(self) -> None:
        """Switch timing on or off if that was requested, without a report.

        The same collective as :meth:`report`; every rank of the group calls it.
        """
        if self._reporter is not None:
            wanted = self._state.wanted()
            self._apply(self._reporter.gather(enabled=self.enabled, wanted=wanted), None)

    def _handler(self) -> None:
        """Start the listener on rank 0 where it does not run; it has a thread of its own."""
        self._controller()

    def _controller(self) -> None:
        """Start the listener on rank 0; a port that is in use is one warning. Else do nothing."""
        if self._listener is not None:
            self._listener.start(self._state)

    def _min_max(
        self,
        ptime: float,
        btime: float,
        temp: float,
        power: float,
        util: float,
        clock: float,
        flops: float,
    ) -> _StragglerData | None:
        """Find the extremes of given values over the ranks.

        The same collective as :meth:`report`; every rank of the group calls it.

        Args:
            ptime: Time of the compute ranges per iteration, ms.
            btime: Longest data range, ms.
            temp: GPU temperature, C.
            power: GPU power, W.
            util: GPU utilisation, %.
            clock: GPU clock, MHz.
            flops: Estimated throughput, TFLOP/s.

        Returns:
            The extremes on rank 0 while on, else None.
        """
        if self._reporter is None:
            return None
        metrics = (ptime, btime, temp, power, util, clock, flops)
        rows = self._reporter.gather(
            enabled=self.enabled,
            wanted=self._state.wanted(),
            metrics=metrics if self.enabled else UNKNOWN_METRICS,
        )
        if self.rank != 0 or self._off:
            return None
        return self._reporter.compare(rows, {}).data()


def _untimed(ranges: ThreadRanges, kind: int) -> Entry:
    """Return what an entry inside an open range leaves while timing is off."""
    return UNTIMED


def _whole(value: float) -> int:
    return 0 if math.isnan(value) else round(value)


__straggler__ = StragglerDetector()
