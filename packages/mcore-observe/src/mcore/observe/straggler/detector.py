"""The detector of slow ranks. It shows whether the GPU or data loading is the cause."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import torch

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
    make_ranges,
)
from mcore.observe.straggler.report import RankComparison, StragglerReport, _StragglerData
from mcore.observe.straggler.reporter import Reporter
from mcore.observe.straggler.sections import (
    SectionTimers,
    check_sections,
    replace_callables,
    time_calls,
)
from mcore.observe.straggler.server.routes import ControllerState
from mcore.observe.straggler.settings import OnStraggler, StragglerSettings
from mcore.observe.straggler.telemetry import guard_telemetry, telemetry_of
from mcore.tensor.device import current_device

if TYPE_CHECKING:
    from mcore.observe.straggler.server.controller import Listener

logger = logging.getLogger("mcore.observe.straggler")

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _take_parameters_of(
    settings: Callable[_P, StragglerSettings],
) -> Callable[[Callable[..., None]], Callable[Concatenate[StragglerDetector, _P], None]]:
    """Give a method the parameters of a class, for type checkers and ``inspect.signature``."""

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[StragglerDetector, _P], None]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [itself, *inspect.signature(settings).parameters.values()]
        vars(method)["__signature__"] = inspect.Signature(parameters, return_annotation="None")
        return method

    return decorate


class StragglerFoundError(RuntimeError):
    """Raised by :meth:`StragglerDetector.report` on all ranks with ``on_straggler="stop"``."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))


class StragglerDetector:
    """Times chosen ranges on every rank and compares the ranks at each log interval.

    There is one object per process: constructing it repeatedly returns the same object, unchanged.
    It does nothing before :meth:`configure`. Every rank of the group calls that and every
    :meth:`report`. ``with detector:`` times a compute range, ``with detector(bdata=True):`` a fetch
    of data, ``with detector.section(name):`` a named section. Ranges nest, and threads do not mix.
    Single kernels inside a range are not timed, unlike with CUPTI.

    A collective inside a range makes all ranks wait for the slowest and hides which rank that is.
    Put sections around the compute before it: each section is judged separately.

    On an accelerator the time of a compute range is that of the device between two events on the
    current stream, or that of the host if it is longer. Only a report waits. On the CPU and for
    data ranges only the host's clock counts. Ranges in a graph capture are skipped and counted.

    Attributes:
        world: The number of ranks, 0 before ``configure``.
        rank: This rank.
        mmcnt: The number of ranks that the report lists at each end of the throughput.
        amp: The time of a step over the timed part of it.
        port: The port requested for the controller.
        start: Opens a range while on, else does nothing.
        stop: Closes it while on, else does nothing.

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
    _on_straggler: OnStraggler

    def __new__(cls) -> StragglerDetector:
        """Return the instance, which the first call creates."""
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

    @_take_parameters_of(StragglerSettings)
    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Make the detector ready. A second call does nothing.

        Every rank of the group calls it with the same ``sections`` and ``enabled``. No collective.

        Args:
            *args: ``world``, ``rank``, ``mmcnt``, ``amp``, ``port``, ``prefill`` and ``enabled``
                of :class:`StragglerSettings`, in this order. They can be keywords, too.
            **kwargs: The other fields of :class:`StragglerSettings`, which documents all of them.

        Raises:
            ValueError: A value is out of range, ``world`` is not the size of the group, or other
                machines can reach ``bind`` and there is no token. Nothing changes then.
            RuntimeError: :meth:`reset_singleton` has replaced this object.
        """
        if self.configured:
            logger.debug("the straggler detector is already configured; nothing was changed")
            return
        if StragglerDetector._instance is not self:
            raise RuntimeError("this straggler detector was replaced; use StragglerDetector()")
        settings = StragglerSettings(*args, **kwargs)
        world, rank = settings.world, settings.rank
        # Everything that can raise comes first, so a wrong value leaves the detector unchanged.
        names = check_sections(settings.sections)
        listener = None
        if settings.controller and rank == 0:
            # This imports the standard library's HTTP server, which most ranks never need.
            from mcore.observe.straggler.server.controller import Listener

            listener = Listener(
                bind=settings.bind,
                port=settings.port,
                token=settings.token,
                allow_get_toggle=settings.allow_get_toggle,
            )
        exchange = Exchange(
            settings.group,
            world=world,
            rank=rank,
            names=names,
            computing=settings.device,
            peers=settings.peers,
        )
        # A device without an index is the current device at the beginning of a range.
        device = torch.device(current_device().type if settings.device is None else settings.device)
        ranges = make_ranges(device, prefill=settings.prefill, sample_every=settings.sample_every)
        given = settings.telemetry
        telemetry = telemetry_of(device) if given is None else guard_telemetry(given)
        self._reporter = Reporter(settings, names, exchange, telemetry)
        self.world, self.rank = world, rank
        self.mmcnt, self.amp, self.port = settings.mmcnt, settings.amp, settings.port
        self._timers = SectionTimers(self._open, self.__exit__, names)
        self._on_straggler = settings.on_straggler
        self._state = ControllerState(rank=rank, world_size=world, enabled=settings.enabled)
        self._use_ranges(ranges)
        self._set_enabled(settings.enabled)
        StragglerDetector._configured = True
        self._listener = listener
        self._controller()

    @property
    def enabled(self) -> bool:
        """Whether ranges are timed now. Requested changes are made at the end of a report."""
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
        """The number of ranks given to :meth:`configure`, 0 before."""
        return self.world

    @property
    def dev(self) -> torch.device:
        """The device of the collective: the CPU for gloo."""
        reporter = self._reporter
        return torch.device("cpu") if reporter is None else reporter.exchange.device

    @property
    def bdata(self) -> bool:
        """Whether this thread's next range is a data range."""
        return self._local.ranges.mark == DATA_KIND

    @property
    def toggle(self) -> bool:
        """Whether a change of timing is requested on this rank for the end of the next report."""
        return self._state.status()["pending"] is not None

    @property
    def last_report(self) -> StragglerReport | None:
        """The result of the last :meth:`report`, on every rank. None before the first."""
        return self._state.last_report

    @property
    def controller_address(self) -> tuple[str, int] | None:
        """Host and port on which this process listens. None if it does not listen."""
        return None if self._listener is None else self._listener.address

    @property
    def controller_error(self) -> OSError | None:
        """The reason why the controller could not listen, else None."""
        return None if self._listener is None else self._listener.error

    @property
    def dropped(self) -> int:
        """The number of ranges timed only by the host's clock, because all events were in use."""
        return self._ranges.dropped

    @property
    def skipped_capture(self) -> int:
        """The number of ranges not timed, because a graph was being captured."""
        return self._ranges.skipped_capture

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Choose the kind of this thread's next range.

        Args:
            bdata: True for a data range, which is timed only by the host's clock.

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
        # Training pays for this and __exit__, so both avoid calls in the common case.
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
        """Close the range. If an exception ended it, the range is dropped.

        Args:
            ex_type: The type of the exception, or None.
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
        except IndexError:  # not opened, or opened while timing was off
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
            self._update_idle()
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
        """Do nothing. ``start`` and ``stop`` call it while off."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Time the body of a with statement under a name.

        Args:
            name: A name of ``sections`` given to :meth:`configure`, which all ranks compare. Any
                other name is timed for ``local_sections`` of this rank's report, with one warning.

        Returns:
            A context manager, which does nothing while off.

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
            TypeError: ``fn`` is a coroutine function or a generator function. Its call returns
                before its body ends.
        """
        return time_calls(self.section, fn, name)

    def wrap_callables(self, callables: Mapping[str, tuple[Any, str]]) -> Callable[[], None]:
        """Time calls of existing methods and functions as sections, by replacing attributes.

        Args:
            callables: Section -> the object, class or module, and the name of its attribute.

        Returns:
            A function that undoes all replacements.

        Raises:
            AttributeError: There is no such attribute.
            TypeError: An attribute is not callable, or :meth:`wrap` refuses it. Nothing is changed
                then.

        Example:
            >>> detector = StragglerDetector()
            >>> model = torch.nn.Linear(2, 2)
            >>> undo = detector.wrap_callables({"forward": (model, "forward")})
            >>> _ = model(torch.ones(1, 2))
            >>> undo()
        """
        return replace_callables(self.wrap, callables)

    def reset(self) -> None:
        """Drop all samples and return their events to the pool. Does nothing while off."""
        if not self._off:
            self._ranges.reset()

    def elapsed(self) -> tuple[float, float, int, int, int, int]:
        """Return the times since the last call or report, and drop the samples.

        Waits for the last event on an accelerator. No communication.

        Returns:
            The sum of compute ranges (ms), the longest data range (ms), and temperature (C),
            power (W), utilisation (%) and clock (MHz) of the GPU. 0 if unknown. All 0 while off.
        """
        if self._off or self._reporter is None:
            return 0.0, 0.0, 0, 0, 0, 0
        stats = self._ranges.take()
        compute, data = stats.get(COMPUTE_KIND), stats.get(DATA_KIND)
        temp, power, util, clock = (
            0 if math.isnan(value) else round(value) for value in self._reporter.telemetry()
        )
        return (
            0.0 if compute is None else compute.sum_ms,
            0.0 if data is None else data.max_ms,
            temp,
            power,
            util,
            clock,
        )

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Compare all ranks, log on rank 0, and switch timing on or off if that was requested.

        Every rank calls it equally often and gets ``last_report``, unless rank 0 is off or passes
        no interval. Collective: an all-gather of a row of float64 over the group, and of names at
        the first call. No communication with a single rank. Does not wait for the device while off.

        Args:
            total_flops: Operations of the whole job since the last call.
            log_interval: Iterations since the last call.

        Returns:
            True on rank 0 if lines were logged: while on, with both arguments above 0.

        Raises:
            RuntimeError: On all ranks, if ranks differ in their sections or have the same rank.
                Also if the collective fails, because a rank died or the group's timeout expired.
            StragglerFoundError: On all ranks, if a rank is slow and ``on_straggler`` is ``"stop"``.
        """
        if self._reporter is None:
            return False
        stats = self._ranges.take() if self.enabled and log_interval > 0 else {}
        rows, comparison = self._reporter.report(
            stats,
            {} if self._timers is None else self._timers.local_stats(stats),
            enabled=self.enabled,
            wanted=self._state.wanted(),
            total_flops=total_flops,
            log_interval=log_interval,
            dropped=self.dropped,
        )
        has_logged = self.rank == 0 and comparison is not None and self._reporter.log(comparison)
        self._apply(rows, comparison)
        # After the switch: a caller that catches the error can continue to report.
        if comparison is not None and self._on_straggler != "log" and comparison.stragglers:
            if self._on_straggler == "stop":
                raise StragglerFoundError(outlier_lines(comparison.stragglers))
            self._on_straggler(comparison.report)
        return has_logged

    def report_if_due(self, flops: float = 0.0) -> bool:
        """Count a step, and :meth:`report` about every ``report_every_s`` seconds.

        Every rank calls it after every step. At each report the ranks agree on the number of steps
        to the next, without further communication. The first report is after 16 steps. Until a
        verdict is possible, reports come ten times as often, but not within 16 steps.

        Args:
            flops: Operations of the whole job in this step.

        Returns:
            The result of :meth:`report`, or False without a report.

        Raises:
            RuntimeError: See :meth:`report`.
        """
        if self._reporter is None or not self._reporter.pace.step(flops):
            return False
        return self.report(self._reporter.pace.flops, self._reporter.pace.steps)

    def show(self, **scalars: float) -> None:
        """Show numbers of the training on the controller: loss, tokens per second.

        Each number stays until it is replaced. Only rank 0 listens. No communication.

        Args:
            **scalars: Numbers by name. Any text can be a name: ``show(**{"lm loss": 2.5})``.

        Raises:
            TypeError: A value is not a number.
        """
        self._state.show({name: float(value) for name, value in scalars.items()})

    def close(self) -> None:
        """Stop listening, switch timing off and release the events. A second call does nothing.

        The detector stays configured. It may continue to :meth:`report`, so other ranks do not wait
        for it. Rank 0 then switches all of them off.
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
        """Close the detector and forget it: the next ``StragglerDetector()`` is a new object.

        For tests. All ranks of a group call it, or none. ``__straggler__`` keeps the old object.
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
        self._reporter = self._timers = self._listener = None
        self._on_straggler = "log"
        self._state = ControllerState(rank=0, world_size=0, enabled=False)

    def _use_ranges(self, ranges: HostRanges) -> None:
        """Replace the object that times ranges, and switch timing off."""
        self._ranges = ranges
        self._local = ranges.local
        self._now_ns = ranges.now_ns
        self._set_enabled(False)

    def _set_enabled(self, enabled: bool) -> None:
        """Start or stop timing. A range that is open is still closed and kept."""
        self._off = not enabled
        self.start: Callable[[], None] = self.start_method if enabled else self.null_method
        self.stop: Callable[[], None] = self.stop_method if enabled else self.null_method
        if enabled:
            self._ranges.switched_on()
            self._begin = self._ranges.begin if self._ranges.has_begin else None
        else:
            # While off, an entry inside an open range still has to leave something for its exit.
            self._begin = lambda ranges, kind: UNTIMED
            self._ranges.clear_marks()
        self._update_idle()

    def _update_idle(self) -> None:
        self._idle = self._off and not self._ranges.has_open()

    def _open(self, kind: int) -> None:
        """Open a range of a given kind, without using up the mark of ``__call__``."""
        if not self._idle:
            ranges = self._local.ranges
            ranges.make_room(kind)
            self._push(ranges, kind)

    def _push(self, ranges: ThreadRanges, kind: int) -> None:
        begin = self._begin
        ranges.stack.append((kind, self._now_ns(), None) if begin is None else begin(ranges, kind))

    def _apply(self, rows: GatheredRows, comparison: RankComparison | None) -> None:
        """Switch to the state that rank 0 wants. No communication."""
        if self.rank == 0 and self._reporter is not None:
            self._reporter.log_switch(rows)
        elif self.rank != 0:
            self._state.request(rows.wanted)
        if rows.wanted != self.enabled:
            self._set_enabled(rows.wanted)
        self._state.applied(rows.wanted, comparison)

    def _check_toggle(self) -> None:
        """Switch timing on or off if that was requested, without a report.

        Every rank of the group calls it. Collective: the all-gather of :meth:`report`.
        """
        if self._reporter is not None:
            wanted = self._state.wanted()
            rows = self._reporter.exchange.gather(enabled=self.enabled, wanted=wanted)
            self._apply(rows, None)

    def _handler(self) -> None:
        """Start the listener on rank 0 if it does not run. It uses a separate thread."""
        self._controller()

    def _controller(self) -> None:
        """Start the listener on rank 0, with a warning if the port is in use. Else do nothing."""
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

        Every rank of the group calls it. Collective: the all-gather of :meth:`report`.

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
        rows = self._reporter.exchange.gather(
            enabled=self.enabled,
            wanted=self._state.wanted(),
            metrics=metrics if self.enabled else UNKNOWN_METRICS,
        )
        if self.rank != 0 or self._off:
            return None
        return self._reporter.compare(rows, {}).data()


__straggler__ = StragglerDetector()
