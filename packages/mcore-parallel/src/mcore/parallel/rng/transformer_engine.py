"""The adapter to TransformerEngine's tracker of random number streams."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mcore.parallel.rng.state import clone_rng_state, read_generators
from mcore.parallel.rng.tracker import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    RngTracker,
    new_stream_seed,
)
from mcore.versioning import get_te_version, is_te_min_version

TE_MODULE = "transformer_engine.pytorch.distributed"
MIN_TE_VERSION = "1.5.0"


def make_te_tracker(is_inference_rng_tracker: bool = False) -> RngTracker | None:
    """Make a tracker on top of TransformerEngine's, or return None if that is not installed."""
    if not is_te_min_version("0.0.0"):
        return None
    if not is_te_min_version(MIN_TE_VERSION):
        raise RuntimeError(
            f"use_te_rng_tracker needs TransformerEngine >= {MIN_TE_VERSION}, found "
            f"{get_te_version()}: upgrade it (pip install 'mcore-parallel[te]') or turn the flag "
            "off"
        )
    try:
        base = importlib.import_module(TE_MODULE).CudaRNGStatesTracker
    except (ImportError, OSError, AttributeError) as error:
        raise RuntimeError(
            f"use_te_rng_tracker: TransformerEngine {get_te_version()} is installed, but its "
            f"tracker {TE_MODULE}.CudaRNGStatesTracker cannot be imported: {error}"
        ) from error
    tracker: RngTracker = _adapt_class(base)(is_inference_rng_tracker)
    return tracker


def is_te_tracker(tracker: object) -> bool:
    """Return whether a tracker is one of TransformerEngine's. Imports nothing."""
    base = getattr(sys.modules.get(TE_MODULE), "CudaRNGStatesTracker", None)
    return base is not None and isinstance(tracker, base)


class _TESnapshot(AbstractContextManager[None]):
    """A reusable block in which TransformerEngine's streams are as when this object was made."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._moment = self._capture_moment()
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside.append(self._capture_moment())
        self._restore(*self._moment)

    def __exit__(self, *error: object) -> None:
        self._restore(*self._outside.pop())

    def _capture_moment(self) -> tuple[dict[str, Any], set[int], list[Any]]:
        states = self._tracker.get_states()
        return states, set(self._tracker.seeds_), read_generators(states.values())

    def _restore(self, states: dict[str, Any], seeds: set[int], values: list[Any]) -> None:
        for generator, value in values:  # graphs have registered the generators
            generator.set_state(value)
        self._tracker.set_states(states)
        self._tracker.seeds_ = set(seeds)


@functools.cache
def _adapt_class(base: Any) -> Any:
    class TECudaRNGStatesTracker(base):  # type: ignore[misc]
        """TransformerEngine's tracker with the checks and states of CudaRNGStatesTracker."""

        def __init__(self, is_inference_rng_tracker: bool) -> None:
            self.is_inference_rng_tracker = is_inference_rng_tracker
            super().__init__()
            self.reset()

        def is_initialized(self) -> bool:
            return self._is_initialized

        def reset(self) -> None:
            super().reset()
            self._is_initialized = False

        def get_states(self, *, clone: bool = False) -> dict[str, Any]:
            states = dict(super().get_states())
            return {n: clone_rng_state(s) for n, s in states.items()} if clone else states

        def set_states(self, states: Mapping[str, Any]) -> None:
            if self.is_inference_rng_tracker:
                return
            super().set_states(dict(states))
            self.seeds_: set[int] = set()
            self._is_initialized = True

        def add(self, name: str, seed: int) -> None:
            if self.is_inference_rng_tracker:
                return
            seed = new_stream_seed(name, seed, self.states_, self.seeds_)
            super().add(name, seed)
            self._is_initialized = True

        def fork(
            self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME, *, check_cpu: bool = True
        ) -> AbstractContextManager[None]:
            if self.is_inference_rng_tracker:
                return nullcontext()
            forked: AbstractContextManager[None] = super().fork(name)
            return forked

        def snapshot(self) -> AbstractContextManager[None]:
            return _TESnapshot(self) if self._is_initialized else nullcontext()

    return TECudaRNGStatesTracker
