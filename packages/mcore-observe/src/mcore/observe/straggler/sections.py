"""Named sections: their names, which all ranks share, and the context managers that time them."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any, ParamSpec, TypeAlias, TypeVar

from mcore.observe.straggler.ranges import SectionStats

logger = logging.getLogger("mcore.observe.straggler")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Open: TypeAlias = Callable[[int], None]
_Close: TypeAlias = Callable[..., object]

_BUILT_IN = ("compute", "data")
_MAX_SECTIONS = 64
_MAX_UNDECLARED = 64
_HASH_BITS = 52  # a float64 holds such an integer exactly


def check_sections(sections: Sequence[str]) -> tuple[str, ...]:
    """Return the two built-in names followed by the declared names, or raise ValueError."""
    if isinstance(sections, str):
        raise ValueError(f"sections is the text {sections!r}; give a sequence of names")
    if len(sections) > _MAX_SECTIONS:
        raise ValueError(f"{len(sections)} sections; at most {_MAX_SECTIONS} can be declared")
    names = (*_BUILT_IN, *sections)
    for name in sections:
        _check_name(name)
        if names.count(name) > 1:
            raise ValueError(
                f"section {name!r} is declared twice or built in; give each a different name "
                f"(built in are {_BUILT_IN[0]!r} and {_BUILT_IN[1]!r})"
            )
    return names


def section_hash(names: Sequence[str]) -> float:
    """Return 52 bits of a hash of names in their order, which a float64 holds exactly."""
    # With lengths, ("ab", "c") and ("a", "bc") differ.
    text = b"".join(len(name.encode()).to_bytes(8, "little") + name.encode() for name in names)
    digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    return float(digest & ((1 << _HASH_BITS) - 1))


class SectionTimer:
    """Times the body of a with statement as a section. It nests, and threads may share it."""

    __slots__ = ("_close", "_kind", "_open")

    def __init__(self, open_range: _Open, close_range: _Close, kind: int) -> None:
        self._open, self._close, self._kind = open_range, close_range, kind

    def __enter__(self) -> None:
        self._open(self._kind)

    def __exit__(self, *raised: Any) -> None:
        self._close(*raised)


class SectionTimers:
    """The timers of sections by name. Undeclared sections are numbered in order of first use.

    They open a range of a kind, and close it with the exception that ends it.
    """

    def __init__(self, open_range: _Open, close_range: _Close, names: Sequence[str]) -> None:
        self._make = functools.partial(SectionTimer, open_range, close_range)
        self._lock = threading.Lock()
        self._num_declared = len(names)
        self._has_warned = self._has_warned_of_many = False
        self._timers = {name: self._make(kind) for kind, name in enumerate(names)}

    def __getitem__(self, name: str) -> AbstractContextManager[None]:
        """Return the timer of a section. ValueError for a name that is empty or not text."""
        timer = self._timers.get(name)
        return self._add_undeclared(name) if timer is None else timer

    def local_stats(self, stats: Mapping[int, SectionStats]) -> dict[str, SectionStats]:
        """Return the statistics of the sections that were not declared, by name."""
        names = list(self._timers)
        return {
            names[kind]: of_kind for kind, of_kind in stats.items() if kind >= self._num_declared
        }

    def _add_undeclared(self, name: str) -> AbstractContextManager[None]:
        _check_name(name)
        with self._lock:
            if name in self._timers:  # another thread was faster
                return self._timers[name]
            if len(self._timers) >= self._num_declared + _MAX_UNDECLARED:
                if not self._has_warned_of_many:
                    self._has_warned_of_many = True
                    logger.warning(
                        "straggler: section %r and others are not timed: there are already %d "
                        "sections that were not given to configure()",
                        name,
                        _MAX_UNDECLARED,
                    )
                return nullcontext()
            timer = self._timers[name] = self._make(len(self._timers))
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "straggler: section %r is not among the sections given to configure(); it and "
                "other such sections are timed on this rank only",
                name,
            )
        return timer


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"section name is {name!r}; give a non-empty text")


def time_calls(
    section: Callable[[str], AbstractContextManager[None]], fn: Callable[_P, _R], name: str
) -> Callable[_P, _R]:
    """See :meth:`StragglerDetector.wrap`."""
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"wrap() cannot time {fn!r}, which suspends; use section() around plain calls"
        )

    @functools.wraps(fn)
    def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with section(name):
            return fn(*args, **kwargs)

    return timed


def replace_callables(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]],
    callables: Mapping[str, tuple[Any, str]],
) -> Callable[[], None]:
    """See :meth:`StragglerDetector.wrap_callables`. All are wrapped before any is replaced."""
    replaced = []
    for section, (owner, name) in callables.items():
        plain = inspect.getattr_static(owner, name)  # getattr would unwrap a static method
        kind = type(plain) if isinstance(plain, (staticmethod, classmethod)) else None
        if inspect.isclass(owner):
            function = plain.__func__ if kind else plain
        else:
            function, kind = getattr(owner, name), None
        if not callable(function):
            raise TypeError(f"{name!r} of {owner!r} for the section {section!r} is not callable")
        timed: Any = wrap(function, section)
        has_own = name in vars(owner)
        replaced.append((owner, name, kind(timed) if kind else timed, has_own, plain))
    for owner, name, timed, _, _ in replaced:
        setattr(owner, name, timed)

    def undo() -> None:
        while replaced:
            owner, name, _, has_own, plain = replaced.pop()
            if has_own:
                setattr(owner, name, plain)
            else:  # it was inherited, or looked up on the class of the object
                delattr(owner, name)

    return undo
