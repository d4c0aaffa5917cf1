"""``mcore.versioning`` against megatron-core, a plain class and ``packaging.version``."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from timeit import Timer
from typing import Any

from bench.measure import Row, paired
from mcore.versioning import (
    deprecated,
    experimental_cls,
    experimental_fn,
    is_torch_min_version,
    set_experimental_flag,
)

_CALLS = 1000
_BATCHES = 2
_REPEATS = 61
_REQUESTS = ("0.1", "2.0.0", "2.6.0", "2.6.0a0", "3.0", "1000.0.1")
_IMPORT_TIMER = (
    "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
)


def run() -> Iterable[Row]:
    """Yield the rows; the checks of agreement come before each timing."""
    peer_config: Any = import_module("megatron.core.config")
    peer: Any = import_module("megatron.core.utils")
    import_module("torch")  # the checks are about a module that is loaded
    name = f"megatron-core {version('megatron-core')}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield _minimum_check(peer, name)
        yield _deprecated_call(peer, name)
        with _experimental_everywhere(peer_config):
            yield _experimental_call(peer, peer_config, name)
            yield from _experimental_class()
    yield from _import_cost(name)


def _minimum_check(peer: Any, name: str) -> Row:
    case = "is_torch_min_version, cached"
    for request in _REQUESTS:
        ours, theirs = is_torch_min_version(request), peer.is_torch_min_version(request)
        if ours != theirs:
            return Row.disagreement(case, name, f"{request}: {ours} against {theirs}")
    ours_s, peer_s = _paired_calls(is_torch_min_version, peer.is_torch_min_version, "2.6.0")
    return Row(
        case,
        ours_s,
        name,
        peer_s,
        target=10.0,
        agreement=f"{len(_REQUESTS)} requests",
    )


def _deprecated_call(peer: Any, name: str) -> Row:
    case = "deprecated, call overhead"
    ours = deprecated("1.0.0", "2.0.0", "new", "Slow.")(_fresh_function())
    theirs = peer.deprecated("1.0.0", "2.0.0", "new", "Slow.")(_fresh_function())
    seen = [_warning_categories(function) for function in (ours, theirs)]
    if seen[0] != seen[1]:
        return Row.disagreement(case, name, f"warnings {seen[0]} against {seen[1]}")
    return _overhead(case, ours, theirs, name, target=1.25, agreement="value and warning category")


def _experimental_call(peer: Any, peer_config: Any, name: str) -> Row:
    case = "experimental_fn, call overhead"
    ours = experimental_fn("0.16.0")(_fresh_function())
    theirs = peer.experimental_fn("0.16.0")(_fresh_function())
    results = [ours(4), theirs(4), *_refusals(ours, theirs, peer_config)]
    if results[0] != results[1] or results[2] != results[3]:
        return Row.disagreement(case, name, f"{results}")
    return _overhead(case, ours, theirs, name, target=1.35, agreement="value, refusal when off")


def _experimental_class() -> Iterator[Row]:
    gated, plain = experimental_cls("0.1.0")(_fresh_class()), _fresh_class()
    instance, other = gated(3), plain(3)
    if vars(instance) != vars(other) or type(instance) is not gated:
        yield Row.disagreement("experimental_cls", "plain class", "different instances")
        return
    for case, ours, theirs, target in (
        ("experimental_cls, construction", gated, plain, 1 / 5),
        ("experimental_cls, 10 reads of an attribute", instance.read, other.read, 1 / 2),
    ):
        ours_s, peer_s = _paired_calls(ours, theirs, 3)
        yield Row(
            case,
            ours_s,
            "plain class",
            peer_s,
            target=target,
            agreement="same attributes",
        )


def _import_cost(name: str) -> Iterator[Row]:
    ours_s, packaging_s = _import_seconds("mcore.versioning", "packaging.version", repeats=15)
    yield Row(
        "import mcore.versioning",
        ours_s,
        "packaging.version alone",
        packaging_s,
        target=0.5,
        note="fresh processes, the import statement",
    )
    ours_s, peer_s = _import_seconds("mcore.versioning", "megatron.core.utils", repeats=2)
    yield Row(
        "import mcore.versioning",
        ours_s,
        f"megatron.core.utils ({name})",
        peer_s,
        note="fresh processes, the import statement",
    )


def _overhead(
    case: str,
    ours: Callable[[int], int],
    theirs: Callable[[int], int],
    name: str,
    *,
    target: float,
    agreement: str,
) -> Row:
    """What both wrappers add to a call of the function without a wrapper."""
    plain = _fresh_function()
    plain_s, _ = _paired_calls(plain, plain, 4)
    ours_s, peer_s = _paired_calls(ours, theirs, 4)
    return Row(
        case,
        ours_s - plain_s,
        name,
        peer_s - plain_s,
        target=target,
        agreement=agreement,
        note=f"beyond {plain_s / 1e-9:.0f} ns for the bare function",
    )


def _paired_calls(
    ours: Callable[[Any], Any], theirs: Callable[[Any], Any], argument: Any
) -> tuple[float, float]:
    """Seconds per call with one argument; many short repeats, of which the fastest counts."""
    ours_s, peer_s = paired(
        _calls(ours, argument), _calls(theirs, argument), number=_BATCHES, repeats=_REPEATS
    )
    return ours_s / _CALLS, peer_s / _CALLS


def _calls(function: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    """Many calls in a loop of their own: the interpreter specialises each loop for its callee."""
    timer = Timer("function(argument)", globals={"function": function, "argument": argument})
    return lambda: timer.timeit(_CALLS)


def _fresh_function() -> Callable[[int], int]:
    def double(x: int) -> int:
        return 2 * x

    return double


def _fresh_class() -> type[Any]:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def read(self, _: int) -> int:
            """Reads an attribute often enough to outweigh the call."""
            self.x, self.x, self.x, self.x, self.x, self.x, self.x, self.x, self.x  # noqa: B018
            return self.x

    return Point


def _warning_categories(function: Callable[[int], int]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = function(4)
    return [str(value), *(warning.category.__name__ for warning in caught)]


def _refusals(ours: Any, theirs: Any, peer_config: Any) -> list[str]:
    """The names of the errors while experimental code is off."""
    names = []
    _set_both_flags(peer_config, False)
    for function in (ours, theirs):
        try:
            function(4)
        except Exception as error:
            names.append(type(error).__name__)
        else:
            names.append("no error")
    _set_both_flags(peer_config, True)
    return names


@contextmanager
def _experimental_everywhere(peer_config: Any) -> Iterator[None]:
    _set_both_flags(peer_config, True)
    try:
        yield
    finally:
        _set_both_flags(peer_config, False)


def _set_both_flags(peer_config: Any, flag: bool) -> None:
    set_experimental_flag(flag)
    peer_config.set_experimental_flag(flag)


def _import_seconds(ours: str, peer: str, *, repeats: int) -> tuple[float, float]:
    """The minimum over fresh interpreters, which take turns; one untimed start of each warms up."""
    best = {ours: math.inf, peer: math.inf}
    for repeat in range(repeats + 1):
        for module in (ours, peer):
            output = subprocess.run(
                [sys.executable, "-I", "-W", "ignore", "-c", _IMPORT_TIMER.format(module=module)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            if repeat:
                best[module] = min(best[module], float(output.splitlines()[-1]))
    return best[ours], best[peer]
