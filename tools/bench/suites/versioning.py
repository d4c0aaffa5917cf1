"""``mcore.versioning`` against megatron-core, a plain class and ``packaging.version``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from bench.measure import Row, compare, compare_imports, loop, paired
from bench.peers import megatron, name_of
from mcore import versioning
from mcore.versioning import experimental_cls, is_torch_min_version, set_experimental_flag

_CALLS = 1000
_DEPRECATION = ("1.0.0", "2.0.0", "new", "Slow.")
_ROUNDS: Any = {"number": 2, "repeats": 61}
_REQUESTS = ("0.1", "2.0.0", "2.6.0", "2.6.0a0", "3.0", "1000.0.1")


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    peer_config, peer, name = megatron("config"), megatron("utils"), name_of()
    import_module("torch")  # the version checks are about a loaded module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield _compare_minimum(peer, name)
        with _enable_experimental(peer_config):
            for wrapper, arguments, target, agreement in (
                ("deprecated", _DEPRECATION, 1.25, "value and warning category"),
                ("experimental_fn", ("0.16.0",), 1.35, "value, refusal when off"),
            ):
                ours, theirs = (
                    getattr(module, wrapper)(*arguments)(_make_function())
                    for module in (versioning, peer)
                )
                seen = [_observe(function, peer_config) for function in (ours, theirs)]
                case = f"{wrapper}, call overhead"
                yield _compare_overhead(case, ours, theirs, name, target, agreement, seen)
            yield from _compare_experimental_cls()
    yield compare_imports(
        "mcore.versioning", "packaging.version", "packaging.version alone", 0.5, repeats=15
    )
    module = "megatron.core.utils"
    yield compare_imports("mcore.versioning", module, f"{module} ({name})", repeats=2)


def _compare_minimum(peer: Any, name: str) -> Row:
    pairs = [
        (request, is_torch_min_version(request), peer.is_torch_min_version(request))
        for request in _REQUESTS
    ]
    return compare(
        "is_torch_min_version, cached", loop(is_torch_min_version, "2.6.0", calls=_CALLS), name,
        loop(peer.is_torch_min_version, "2.6.0", calls=_CALLS), 10.0,
        agreement=f"{len(_REQUESTS)} requests",
        difference=[pair for pair in pairs if pair[1] != pair[2]], calls=_CALLS, **_ROUNDS,
    )  # fmt: skip


def _compare_experimental_cls() -> Iterator[Row]:
    gated, plain = experimental_cls("0.1.0")(_make_class()), _make_class()
    instance, other = gated(3), plain(3)
    is_same = vars(instance) == vars(other) and type(instance) is gated
    for case, ours, theirs, target in (
        ("experimental_cls, construction", gated, plain, 1 / 5),
        ("experimental_cls, 10 reads of an attribute", instance.read, other.read, 1 / 2),
    ):
        yield compare(
            case, loop(ours, 3, calls=_CALLS), "plain class", loop(theirs, 3, calls=_CALLS), target,
            agreement="same attributes", difference="" if is_same else "different instances",
            calls=_CALLS, **_ROUNDS,
        )  # fmt: skip


def _compare_overhead(
    case: str, ours: Callable[[int], int], theirs: Callable[[int], int], name: str, target: float,
    agreement: str, seen: list[Any],
) -> Row:  # fmt: skip
    """The time that each wrapper adds to a call of the bare function."""
    if seen[0] != seen[1]:
        return Row.disagreement(case, name, f"{seen[0]} against {seen[1]}")
    plain = loop(_make_function(), 4, calls=_CALLS)
    plain_s = paired(plain, plain, **_ROUNDS)[0] / _CALLS
    both = paired(loop(ours, 4, calls=_CALLS), loop(theirs, 4, calls=_CALLS), **_ROUNDS)
    ours_s, peer_s = (seconds / _CALLS - plain_s for seconds in both)
    note = f"beyond {plain_s / 1e-9:.0f} ns for the bare function"
    return Row(case, ours_s, name, peer_s, target, agreement, note)


def _make_function() -> Callable[[int], int]:
    def double(x: int) -> int:
        return 2 * x

    return double


def _make_class() -> type[Any]:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def read(self, _: int) -> int:
            """Read an attribute often enough to outweigh the call."""
            self.x, self.x, self.x, self.x, self.x, self.x, self.x, self.x, self.x  # noqa: B018
            return self.x

    return Point


def _observe(function: Callable[[int], int], peer_config: Any) -> list[str]:
    """The value or the error of a call and its warnings, with experimental features off and on."""
    seen = []
    for flag in (False, True):
        _set_both_flags(peer_config, flag)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                seen.append(str(function(4)))
            except Exception as error:
                seen.append(type(error).__name__)
        seen += [warning.category.__name__ for warning in caught]
    return seen


@contextmanager
def _enable_experimental(peer_config: Any) -> Iterator[None]:
    _set_both_flags(peer_config, True)
    try:
        yield
    finally:
        _set_both_flags(peer_config, False)


def _set_both_flags(peer_config: Any, flag: bool) -> None:
    set_experimental_flag(flag)
    peer_config.set_experimental_flag(flag)
