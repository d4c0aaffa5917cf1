"""Watch the ranks of one run until each has ended, or has to be ended."""

import contextlib
import math
import multiprocessing.connection
import os
import pickle
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from rank_testing.child import STACK_SIGNAL, Outcome, Request, main

PROCESS_NAME = "rank_testing rank "
# How long the other ranks may continue after the first failure: on a busy machine it takes long to
# notice that a peer is gone, to clean up and to report it.
GRACE_S = 20.0
# How long a rank that returned keeps its connections open for peers that have not.
_LINGER_S = 20.0
_STACKS_BEFORE_THE_END_S = 5.0
_JOIN_S = 5.0


class Rank:
    """One rank, seen from the test process. It runs once this object exists.

    ``outcome`` stays None for a rank that died or hung, ``exit_code`` belongs to a rank that died,
    and ``ended_at`` is of ``time.monotonic()``.
    """

    def __init__(self, context: ForkServerContext | SpawnContext, request: Request) -> None:
        self.number = request.rank
        self.outcome: Outcome | None = None
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self._request = request
        self._is_killed = self._is_closed = False
        self._connection, theirs = context.Pipe()
        name = f"{PROCESS_NAME}{request.rank}"
        self._process = context.Process(target=main, args=(request, theirs), name=name)
        try:
            self._process.start()
        except (EOFError, OSError) as error:
            self._connection.close()
            raise RuntimeError(f"the process of rank {request.rank} did not start") from error
        finally:
            theirs.close()

    @property
    def has_returned(self) -> bool:
        """Whether its function returned."""
        return self.outcome is not None and self.outcome.kind == "returned"

    @property
    def has_failed(self) -> bool:
        """Whether it ended in any other way than by returning."""
        return self.ended_at is not None and not self.has_returned

    def look(self) -> None:
        """Read the state of this rank, without waiting."""
        # Before the connection: a dead rank has sent all it will send.
        is_dead = not self._process.is_alive()
        if not self._is_closed and self._connection.poll(0):
            try:
                self._connection.recv_bytes()
            except (EOFError, ConnectionError):
                self._is_closed = True
            else:
                self.outcome = pickle.loads(Path(self._request.path("outcome")).read_bytes())
        if self.outcome is not None:
            self.ended_at = self.outcome.moment
        elif is_dead:
            self.exit_code = self._process.exitcode
            self.ended_at = time.monotonic()
        if self.has_failed:
            self.kill()

    def read(self, kind: str) -> str:
        """Return the text of a file of this rank, empty if the rank never opened the file."""
        try:
            return Path(self._request.path(kind)).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def list_sources(self) -> list[Connection | int]:
        """Return the objects that become ready when the state of this rank changes."""
        sentinel = self._process.sentinel
        return [sentinel] if self._is_closed else [self._connection, sentinel]

    def request_stacks(self) -> None:
        """Make the rank write its Python stacks to its file."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.pid is not None:
                os.kill(self._process.pid, STACK_SIGNAL)

    def kill(self) -> None:
        """Kill the rank and its programs, only once, since its number may be reused later."""
        if self._is_killed:
            return
        self._is_killed = True
        self._connection.close()
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def join(self) -> None:
        """Wait until the killed rank is gone."""
        self._process.join(_JOIN_S)
        with contextlib.suppress(ValueError):
            self._process.close()


def watch(ranks: list[Rank], deadline: float) -> None:
    """Wait for all ranks at once, until the deadline or a grace time after the first failure.

    Before it stops, the ranks that still run write their stacks. They are not killed here.
    """
    stop_at = deadline
    stacks_at = _time_stacks(time.monotonic(), stop_at)
    while running := [rank for rank in ranks if rank.ended_at is None]:
        now = time.monotonic()
        if now >= stop_at:
            return
        if now >= stacks_at:
            stacks_at = stop_at
            for rank in running:
                rank.request_stacks()
        timeout_s = max(0.0, min(stacks_at, _end_returned(ranks, now)) - now)
        sources = [source for rank in running for source in rank.list_sources()]
        multiprocessing.connection.wait(sources, timeout=timeout_s)
        for rank in running:
            rank.look()
        now = time.monotonic()
        if stop_at > now + GRACE_S and any(rank.has_failed for rank in ranks):
            stop_at = now + GRACE_S
            stacks_at = _time_stacks(now, stop_at)


def _time_stacks(now: float, stop_at: float) -> float:
    return stop_at - min(_STACKS_BEFORE_THE_END_S, (stop_at - now) / 2)


def _end_returned(ranks: list[Rank], now: float) -> float:
    """End the ranks that returned and stayed long enough; return when the next one is due.

    A rank that returned may have data on the way to its peers. It cannot stay forever: a peer
    that waits for a collective which this rank never entered has to notice that it is gone.
    """
    next_at = math.inf
    any_failed = any(rank.has_failed for rank in ranks)
    for rank in ranks:
        if not rank.has_returned or rank.ended_at is None:
            continue
        if any_failed or now >= rank.ended_at + _LINGER_S:
            rank.kill()
        else:
            next_at = min(next_at, rank.ended_at + _LINGER_S)
    return next_at
