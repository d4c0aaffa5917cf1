"""Named streams of random numbers on one device, each usable as the default for one block."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from mcore.parallel.rng.state import (
    RngState,
    clone_rng_state,
    default_generator,
    read_generators,
    read_rng_state,
    require_graph_safe_generators,
    resolve_rng_device,
    write_rng_state,
)

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that differs between expert-parallel ranks.

    Example:
        >>> get_expert_parallel_rng_tracker_name()
        'expert-parallel-rng'
    """
    return _EXPERT_PARALLEL_RNG_TRACKER_NAME


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that all ranks of a model replica share.

    Example:
        >>> get_data_parallel_rng_tracker_name()
        'data-parallel-rng'
    """
    return _DATA_PARALLEL_RNG_TRACKER_NAME


class UnknownRngStreamError(KeyError):
    """No stream was added under the requested name.

    Example:
        >>> try:
        ...     with CudaRNGStatesTracker(device="cpu").fork("dropout"):
        ...         pass
        ... except KeyError as error:
        ...     print(error)
        cuda rng state dropout is not added
    """

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0])


class RngTracker(Protocol):
    """The interface of every tracker, this package's and TransformerEngine's."""

    is_inference_rng_tracker: bool

    def is_initialized(self) -> bool: ...
    def reset(self) -> None: ...
    def get_states(self, *, clone: bool = False) -> dict[str, Any]: ...
    def set_states(self, states: Mapping[str, Any]) -> None: ...
    def add(self, name: str, seed: int) -> None: ...
    def fork(
        self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, *, check_cpu: bool = True
    ) -> AbstractContextManager[None]: ...
    def snapshot(self) -> AbstractContextManager[None]: ...


class CudaRNGStatesTracker:
    """Keeps named streams of random numbers and makes one the device's default inside ``fork``.

    Local to the process, no communication. Forks may be nested in any order and depth, also with
    the same name: every stream yields the same numbers as if it were used alone. Like the default
    generator that it exchanges, a tracker is not thread-safe.

    Args:
        use_cudagraphable_rng: Keep generators and exchange handles, which CUDA graphs can capture.
            On devices without graphs, such as the CPU, copies of generators yield the same numbers.
        is_inference_rng_tracker: ``add`` and ``set_states`` do nothing, and ``fork`` leaves the
            default random numbers unchanged, for any name.
        device: Device of the streams. Default the current accelerator, else the CPU, at the first
            use after ``reset``.

    Attributes:
        states_: State by name: a uint8 tensor, or a ``torch.Generator`` when graph-safe.
            ``get_states`` updates the states of streams in use.
        seeds_: The seeds in use.
        use_cudagraphable_rng: Whether states are generators.
        is_inference_rng_tracker: Whether this tracker leaves the random numbers unchanged.

    Example:
        >>> tracker = CudaRNGStatesTracker(device="cpu")
        >>> tracker.add("dropout", 1234)
        >>> with tracker.fork("dropout"):
        ...     drawn = torch.rand(3)
        >>> torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1234)))
        True
    """

    def __init__(
        self,
        use_cudagraphable_rng: bool = False,
        is_inference_rng_tracker: bool = False,
        *,
        device: int | str | torch.device | None = None,
    ) -> None:
        self.use_cudagraphable_rng = use_cudagraphable_rng
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self._device_wanted = device
        self._cached_generator: torch.Generator | None = None
        self._has_warned = False
        self.reset()

    @property
    def device(self) -> torch.device:
        """The device of the streams, set at the first use if none was given.

        Another device can be assigned while there are no streams.

        Raises:
            RuntimeError: It does not exist, or is a CUDA device without graph-safe generators.
            ValueError: A device is assigned while there are streams.
        """
        return self._generator.device

    @device.setter
    def device(self, device: int | str | torch.device | None) -> None:
        if self.states_:
            raise ValueError(
                f"the streams {sorted(self.states_)} are on {self.device}: reset() the tracker "
                "before assigning another device"
            )
        self._device_wanted = device
        self._cached_generator = None

    def is_initialized(self) -> bool:
        """Return whether ``add`` or ``set_states`` was called since the last ``reset``.

        Example:
            >>> CudaRNGStatesTracker(device="cpu").is_initialized()
            False
        """
        return self._is_initialized

    def reset(self) -> None:
        """Remove all streams and seeds. A stream in use is not stored when its fork ends.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> tracker.reset()
            >>> tracker.get_states()
            {}
        """
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()
        self._is_initialized = False
        # Replaced, never cleared: an open fork keeps its list and so detects that it ended.
        self._forks: list[_Fork] = []
        self._cached_generator = None

    def get_states(self, *, clone: bool = False) -> dict[str, Any]:
        """Return the states of all streams.

        Args:
            clone: Copy the states. Draws never change plain states, but advance generators, which
                are live handles.

        Returns:
            A new dict, state by name.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> tracker.get_states()["dropout"].dtype
            torch.uint8
        """
        if self._forks:
            self.states_[self._forks[-1].name] = self._read()
        if not clone:
            return dict(self.states_)
        return {name: clone_rng_state(state) for name, state in self.states_.items()}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace all streams. The device's current random numbers are unchanged.

        Args:
            states: State by name, as from ``get_states``. The dict is copied, and the tracker no
                longer records seeds in use. Values are checked when they are used.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> saved = tracker.get_states()
            >>> with tracker.fork("dropout"):
            ...     first = torch.rand(3)
            >>> tracker.set_states(saved)
            >>> with tracker.fork("dropout"):
            ...     torch.equal(torch.rand(3), first)
            True
        """
        if self.is_inference_rng_tracker:
            return
        self.states_ = dict(states)
        self.seeds_ = set()
        self._is_initialized = True

    def add(self, name: str, seed: int) -> None:
        """Add a stream. The device's current random numbers are unchanged.

        Args:
            name: A new name.
            seed: A new seed, an integer of any library, from -2 ** 63 to 2 ** 64 - 1. Seeds that
                differ by 2 ** 64 yield the same numbers and count as one.

        Raises:
            TypeError: The seed is not an integer.
            ValueError: The name or the seed is in use, or the seed is too large for torch. Nothing
                is changed.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> list(tracker.get_states())
            ['dropout']
        """
        if self.is_inference_rng_tracker:
            return
        seed = new_stream_seed(name, seed, self.states_, self.seeds_)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.states_[name] = generator if self.use_cudagraphable_rng else generator.get_state()
        self.seeds_.add(seed)
        self._is_initialized = True

    def fork(
        self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, *, check_cpu: bool = True
    ) -> AbstractContextManager[None]:
        """Draw from a named stream inside a ``with`` block, or in a function that it decorates.

        On entry the device's default generator switches to the stream. On exit, also by an
        exception, the state of the stream is stored and the previous numbers continue.

        Args:
            name: Name of an added stream.
            check_cpu: Warn, once for each tracker, if the block of a tracker for another device
                drew from the CPU's default generator, which is not forked. The check copies and
                compares 5 kB.

        Returns:
            A context manager that yields None, for one block at a time.

        Raises:
            UnknownRngStreamError: No stream has this name, a KeyError at the ``with``.
            TypeError: The stored state is of the wrong kind, at the ``with``.
            RuntimeError: The block ended, not by an exception, before a block that was opened
                inside it, as in a suspended generator. All streams are still intact.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> before = torch.get_rng_state()
            >>> with tracker.fork("dropout"):
            ...     _ = torch.rand(3)
            >>> torch.equal(torch.get_rng_state(), before)
            True
        """
        return nullcontext() if self.is_inference_rng_tracker else _Fork(self, name, check_cpu)

    def snapshot(self) -> AbstractContextManager[None]:
        """Return a reusable block in which all random numbers continue from this call.

        Inside it the streams, the open forks and the device's default numbers are as at this call.
        After it they are as before the block. Graphs that are replayed inside it repeat their
        numbers.

        Raises:
            RuntimeError: Streams that CUDA graphs can capture are used while a graph is captured.

        Example:
            >>> tracker = CudaRNGStatesTracker(device="cpu")
            >>> tracker.add("dropout", 1234)
            >>> now = tracker.snapshot()
            >>> with tracker.fork("dropout"):
            ...     first = torch.rand(3)
            >>> with now, tracker.fork("dropout"):
            ...     torch.equal(torch.rand(3), first)
            True
        """
        return Snapshot(self) if self._is_initialized else nullcontext()

    def capture_moment(self) -> Moment:
        """Return the current streams, seeds, forks and default numbers, uncopied."""
        states, current = self.get_states(), self._read()
        # Draws never change plain states.
        is_plain = isinstance(current, torch.Tensor)
        values = [] if is_plain else read_generators([*states.values(), current])
        return Moment(states, self.seeds_, values, self._forks, current)

    def restore_moment(self, moment: Moment) -> None:
        """Continue from a moment. The tracker owns and changes it from now on."""
        self.states_, self.seeds_, self._forks = moment.states, moment.seeds, moment.forks
        write_rng_state(self._generator, moment.current, self.use_cudagraphable_rng)

    @property
    def _generator(self) -> torch.Generator:
        if self._cached_generator is None:
            wanted = self._device_wanted
            device = resolve_rng_device(-1 if wanted is None else wanted)
            if self.use_cudagraphable_rng:
                require_graph_safe_generators(device)
            self._cached_generator = default_generator(device)
        return self._cached_generator

    def _read(self) -> RngState:
        return read_rng_state(self._generator, self.use_cudagraphable_rng)


class Moment(NamedTuple):
    """The streams, seeds and open forks of a tracker, and the default numbers, at one time."""

    states: dict[str, Any]
    seeds: set[int]
    values: list[tuple[torch.Generator, torch.Tensor]]  # generators with their plain states
    forks: list[_Fork]
    current: Any  # an RngState, None for TransformerEngine

    def copy(self) -> Moment:
        """Return a moment with copies of the collections, which the tracker changes in place."""
        return self._replace(
            states=dict(self.states), seeds=set(self.seeds), forks=list(self.forks)
        )


class Snapshot(AbstractContextManager[None]):
    """A reusable block in which a tracker is as it was when this object was made.

    Generators stay the same objects, since graphs have registered them: their states are set.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker, self._moment = tracker, tracker.capture_moment().copy()
        self._outside: list[Moment] = []

    def __enter__(self) -> None:
        self._outside.append(self._tracker.capture_moment())
        self._restore(self._moment.copy())

    def __exit__(self, *error: object) -> None:
        self._restore(self._outside.pop())

    def _restore(self, moment: Moment) -> None:
        for generator, value in moment.values:
            generator.set_state(value)
        self._tracker.restore_moment(moment)


class _Fork(ContextDecorator):
    """One block in which a stream is the default numbers."""

    generator: torch.Generator
    previous: RngState

    def __init__(self, tracker: CudaRNGStatesTracker, name: str, check_cpu: bool) -> None:
        self.tracker, self.name, self._check_cpu = tracker, name, check_cpu
        self.siblings: list[_Fork] = []  # all open forks, including this fork and those inside it

    def _recreate_cm(self) -> _Fork:  # contextlib's hook: each decorated call is a separate block
        return _Fork(self.tracker, self.name, self._check_cpu)

    def __enter__(self) -> None:
        tracker = self.tracker
        if self in self.siblings:
            raise RuntimeError(f"this fork of {self.name} is already open: make one with fork()")
        if self.name not in tracker.states_:
            raise UnknownRngStreamError(f"cuda rng state {self.name} is not added")
        self.generator, self.previous = tracker._generator, tracker._read()
        if tracker._forks:  # the stream in use may be entered again before its fork ends
            tracker.states_[tracker._forks[-1].name] = self.previous
        state = tracker.states_[self.name]
        write_rng_state(self.generator, state, tracker.use_cudagraphable_rng)
        self.siblings = tracker._forks
        self.siblings.append(self)
        is_watching = self._check_cpu and not tracker._has_warned
        watches_cpu = is_watching and self.generator.device.type != "cpu"
        self._cpu_state = torch.get_rng_state() if watches_cpu else None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        tracker, siblings = self.tracker, self.siblings
        if siblings[-1] is not self:
            # The numbers belong to the inner forks. The next of them restores the outer state.
            index = siblings.index(self)
            inner = siblings[index + 1]
            inner.previous = self.previous
            del siblings[index]
            if kind is None:
                raise RuntimeError(
                    f"a fork of {self.name} closed while a fork of {inner.name}, opened inside it, "
                    "is still open: close forks in reverse order, as with blocks do unless a "
                    "generator is suspended inside a block. No stream was changed"
                )
            return
        siblings.pop()
        previous = self.previous
        if siblings is tracker._forks:  # else the tracker was reset inside the fork
            tracker.states_[self.name] = tracker._read()
            if siblings:  # the same stream may have been drawn from in both forks
                previous = tracker.states_.get(siblings[-1].name, previous)
        write_rng_state(self.generator, previous, tracker.use_cudagraphable_rng)
        state = self._cpu_state
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            tracker._has_warned = True
            warnings.warn(
                "CPU RNG state changed within GPU RNG context", RuntimeWarning, stacklevel=2
            )


RNGStatesTracker = CudaRNGStatesTracker


def new_stream_seed(name: str, seed: int, states: Mapping[str, Any], seeds: set[int]) -> int:
    """Return the seed of a new stream as an int. ValueError if the seed or the name is in use."""
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise TypeError(f"the seed of stream {name} must be an int, got {seed!r}") from error
    for used in seeds:
        if (used - number) % 2**64 == 0:  # torch keeps 64 bits: -1 is 2 ** 64 - 1
            as_used = f", as {used}" if used != number else ""
            raise ValueError(f"seed {number} already exists{as_used}")
    if name in states:
        raise ValueError(f"cuda rng state {name} already exists")
    return number
