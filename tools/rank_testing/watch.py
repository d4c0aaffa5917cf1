"""Follow the ranks of one run until each has ended, or has to be ended."""

import contextlib
import math
import multiprocessing.connection
import os
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext

from rank_testing.child import main
from rank_testing.messages import Inbox, Outcome, Request
from rank_testing.orphans import STACK_SIGNAL, kill_group

PROCESS_NAME = "rank_testing rank "
# How long the other ranks may continue after the first failure: on a busy machine it takes long to
# see that a peer is gone, to clean up, and to say so.
GRACE_S = 20.0
# How long a rank that returned keeps its connections open for peers that have not.
_LINGER_S = 20.0
_STACKS_BEFORE_THE_END_S = 5.0
_JOIN_S = 5.0

# Starting a process polls every other one of the test process. Two threads that poll the same one
# at once lose its exit code, so tests that run ranks in several threads take turns.
_polling = threading.Lock()


class Rank:
    """One rank, seen from the test process; it runs once this is made.

    ``outcome`` stays None for a rank that died or hung, ``exit_code`` is that of one that died, and
    ``ended_at`` is of ``time.monotonic()``.
    """

    def __init__(self, context: ForkServerContext | SpawnContext, request: Request) -> None:
        self.number = request.rank
        self.outcome: Outcome | None = None
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self._killed = False
        self._connection, theirs = context.Pipe()
        self._inbox = Inbox(self._connection)
        name = f"{PROCESS_NAME}{request.rank}"
        self._process = context.Process(target=main, args=(request, theirs), name=name)
        try:
            with _polling:
                self._process.start()
        except (EOFError, OSError) as error:
            self._connection.close()
            raise RuntimeError(f"the process of rank {request.rank} did not start") from error
        finally:
            theirs.close()

    @property
    def returned(self) -> bool:
        """Whether its function returned."""
        return self.outcome is not None and self.outcome.kind == "returned"

    @property
    def failed(self) -> bool:
        """Whether it ended in any other way than by returning."""
        return self.ended_at is not None and not self.returned

    def look(self) -> None:
        """Take in what has arrived from this rank, without waiting."""
        with _polling:
            dead = not self._process.is_alive()
        self.outcome = self._inbox.read_available()
        if self.outcome is not None:
            self.ended_at = self.outcome.moment
        elif dead:
            self.exit_code = self._process.exitcode
            self.ended_at = time.monotonic()
        if self.failed:
            self.kill()

    def sources(self) -> list[Connection | int]:
        """Return what becomes ready when there is something to see from this rank."""
        sentinel = self._process.sentinel
        return [sentinel] if self._inbox.closed else [self._connection, sentinel]

    def ask_for_stacks(self) -> None:
        """Make the rank write its Python stacks to its file."""
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, STACK_SIGNAL)

    def kill(self) -> None:
        """Kill the rank and whatever it started; once, since its number may be another's later."""
        if self._killed:
            return
        self._killed = True
        self._connection.close()
        if self._process.pid is not None:
            kill_group(self._process.pid)
        self._process.kill()

    def join(self) -> None:
        """Wait until the killed rank is gone."""
        self._process.join(_JOIN_S)
        with _polling, contextlib.suppress(ValueError):
            self._process.close()


def watch(ranks: list[Rank], deadline: float) -> None:
    """Wait for all ranks at once, until the deadline or a grace time after the first failure.

    Before it stops, the ranks that still run write their stacks; they are not killed here.
    """
    stop_at = deadline
    stacks_at = _time_for_stacks(time.monotonic(), stop_at)
    while running := [rank for rank in ranks if rank.ended_at is None]:
        now = time.monotonic()
        if now >= stop_at:
            return
        if now >= stacks_at:
            stacks_at = stop_at
            for rank in running:
                rank.ask_for_stacks()
        _wait(running, min(stacks_at, _end_returned(ranks, now)) - now)
        for rank in running:
            rank.look()
        now = time.monotonic()
        if stop_at > now + GRACE_S and any(rank.failed for rank in ranks):
            stop_at = now + GRACE_S
            stacks_at = _time_for_stacks(now, stop_at)


def _time_for_stacks(now: float, stop_at: float) -> float:
    return stop_at - min(_STACKS_BEFORE_THE_END_S, (stop_at - now) / 2)


def _wait(running: list[Rank], timeout_s: float) -> None:
    sources = [source for rank in running for source in rank.sources()]
    multiprocessing.connection.wait(sources, timeout=max(0.0, timeout_s))


def _end_returned(ranks: list[Rank], now: float) -> float:
    """End the ranks that returned and stayed long enough; return when the next one will have.

    A rank that returned may have data on the way to its peers. It cannot stay for ever: a peer
    that waits for a collective which this rank never entered has to see that it is gone.
    """
    next_at = math.inf
    any_failed = any(rank.failed for rank in ranks)
    for rank in ranks:
        if not rank.returned or rank.ended_at is None:
            continue
        if any_failed or now >= rank.ended_at + _LINGER_S:
            rank.kill()
        else:
            next_at = min(next_at, rank.ended_at + _LINGER_S)
    return next_at
