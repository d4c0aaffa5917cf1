"""Start the ranks of a test, wait for them, and hand back what they returned."""

import math
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rank_testing.messages import Request, output_path, text_of
from rank_testing.report import diagnose, rank_failure, read_values
from rank_testing.server import start_context, variables_of_the_test
from rank_testing.target import find_target
from rank_testing.watch import PROCESS_NAME, Rank, watch

T = TypeVar("T")

_SET_BY_THE_HARNESS = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    env: Mapping[str, str | None] | None = None,
    init: str | None = "gloo",
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in ``world_size`` fresh processes that form a process group.

    Every rank starts with the environment of this process as it is now, plus ``env``, RANK,
    WORLD_SIZE and LOCAL_RANK, and with one torch thread. Only then is the file of ``fn`` imported.
    On the CPU, torch itself is loaded once: variables that it reads on import have the value they
    had at the first call.
    A rank shares no memory with this process: arguments and results are copies.

    Args:
        fn: a function at the top level of a module, a test file included.
        world_size: the number of ranks, at least 1.
        *args: positional arguments of ``fn``, picklable.
        timeout_s: seconds that the ranks have, from the start of the last one.
        env: variables to set in every rank, or to remove where the value is None.
        init: the backend to initialise ``torch.distributed`` with, all ranks in one group: "gloo",
            or an accelerator's such as "cuda:nccl", whose ranks select the device of their number
            and start more slowly; None for no group.
        **kwargs: keyword arguments of ``fn``, picklable.

    Returns:
        What ``fn`` returned in rank 0, 1, ... Results have to be picklable; tensors are.

    Raises:
        RankFailure: if a rank raises, dies, returns what cannot be pickled, or has not ended in
            time. The first line names the likely culprit; ``.ranks`` has one report for each rank
            that failed. The others have 20 seconds from the first failure, then they are killed.
        TypeError: if ``fn`` is not a module-level function, or an argument cannot be pickled.
        ValueError: if ``world_size`` or ``timeout_s`` is not positive, or ``env`` names a variable
            that the harness sets.
        RuntimeError: if called in a rank.

    Example:
        >>> import math
        >>> run_ranks(math.sqrt, 2, 9.0, init=None)
        [3.0, 3.0]
    """
    __tracebackhide__ = True
    _check(world_size, timeout_s, env or {})
    target = find_target(fn)
    call = _pickled_call(args, kwargs)
    environment = _environment(env or {}, world_size)
    start_method = multiprocessing.get_start_method(allow_none=True)
    with tempfile.TemporaryDirectory(prefix="rank_testing-", ignore_cleanup_errors=True) as folder:
        values = _run(
            [
                Request(
                    rank=rank,
                    world_size=world_size,
                    target=target,
                    call=call,
                    environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_method=start_method,
                    init=init,
                    timeout_s=timeout_s,
                    folder=folder,
                )
                for rank in range(world_size)
            ]
        )
    return [values[rank] for rank in range(world_size)]


def _check(world_size: int, timeout_s: float, env: Mapping[str, str | None]) -> None:
    name = multiprocessing.current_process().name
    if name.startswith(PROCESS_NAME):
        raise RuntimeError(
            f"run_ranks was called in {name}; a rank cannot start ranks, call it in the test"
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is the number of ranks, at least 1; got {world_size!r}")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s is a positive number of seconds, got {timeout_s!r}")
    if taken := sorted(_SET_BY_THE_HARNESS & set(env)):
        raise ValueError(f"env may not name {', '.join(taken)}: every rank gets its own value")


def _pickled_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(
            f"the arguments of the ranks' function have to be picklable: {error}"
        ) from error


def _environment(env: Mapping[str, str | None], world_size: int) -> dict[str, str]:
    merged = {**variables_of_the_test(), **env, "WORLD_SIZE": str(world_size)}
    return {name: value for name, value in merged.items() if value is not None}


def _run(requests: list[Request]) -> dict[int, Any]:
    """Run all requests of one run; return the value of each rank."""
    __tracebackhide__ = True
    first = requests[0]
    context = start_context(first.init)
    ranks: list[Rank] = []
    try:
        for request in requests:
            ranks.append(Rank(context, request))
        started_at = time.monotonic()
        watch(ranks, started_at + first.timeout_s)
        stopped_at = time.monotonic()
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
    values = read_values(ranks)
    reports = diagnose(ranks, first.folder, started_at, stopped_at)
    if reports:
        outputs = {rank: text_of(output_path(first.folder, rank)) for rank in values}
        raise rank_failure(reports, outputs, first.world_size, str(first.target))
    return values
