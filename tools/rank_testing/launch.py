"""Start the ranks of a test, wait for them and return their results."""

import math
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rank_testing.child import Request
from rank_testing.report import diagnose, make_failure
from rank_testing.server import start_context
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

    Every rank starts with the current environment of this process, plus ``env``, RANK, WORLD_SIZE
    and LOCAL_RANK, and with one torch thread. Only then is the file of ``fn`` imported. On the
    CPU, torch is loaded once: variables that it reads on import keep their value of the first call.
    A rank shares no memory with this process: arguments and results are copies.

    Args:
        fn: a function at the top level of a module or test file.
        world_size: the number of ranks, at least 1.
        *args: positional arguments of ``fn``, picklable.
        timeout_s: time limit in seconds, from the start of the last rank.
        env: variables to set in every rank, or to remove if the value is None.
        init: the backend of ``torch.distributed``, all ranks in one group: "gloo", an accelerator's
            such as "cuda:nccl", or None for no group. Ranks on an accelerator select the device of
            their number and start more slowly. "standin:standin_nccl" is the stand-in.
        **kwargs: keyword arguments of ``fn``, picklable.

    Returns:
        The results of ``fn`` in rank 0, 1, ... They have to be picklable. Tensors are.

    Raises:
        RankFailure: if a rank raises, dies, returns a value that cannot be pickled, or exceeds the
            time limit. The first line names the likely culprit. ``.ranks`` has one report for each
            rank that failed. The others are killed 20 seconds after the first failure.
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
    name = multiprocessing.current_process().name
    if name.startswith(PROCESS_NAME):
        raise RuntimeError(
            f"run_ranks was called in {name}; a rank cannot start ranks, call it in the test"
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size is the number of ranks, at least 1, got {world_size!r}")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s is a positive number of seconds, got {timeout_s!r}")
    if taken := sorted(_SET_BY_THE_HARNESS & set(env or {})):
        raise ValueError(f"env may not name {', '.join(taken)}: the harness sets it in each rank")
    target = find_target(fn)
    try:
        call = pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(
            f"the arguments of the ranks' function have to be picklable: {error}"
        ) from error
    merged = {**os.environ, **(env or {}), "WORLD_SIZE": str(world_size)}
    environment = {name: value for name, value in merged.items() if value is not None}
    start_method = multiprocessing.get_start_method(allow_none=True)
    with tempfile.TemporaryDirectory(prefix="rank_testing-", ignore_cleanup_errors=True) as folder:
        return _run(
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


def _run(requests: list[Request]) -> list[Any]:
    """Run all requests of one run and return the value of each rank."""
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
    if reports := diagnose(ranks, started_at, stopped_at):
        outputs = {rank.number: rank.read("output") for rank in ranks if rank.has_returned}
        raise make_failure(reports, outputs, first.world_size, str(first.target))
    return [pickle.loads(rank.outcome.value) for rank in ranks if rank.outcome is not None]
