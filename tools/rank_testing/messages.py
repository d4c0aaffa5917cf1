"""What the test process and its ranks send to each other, and the files that ranks leave."""

import os
import pickle
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from rank_testing.target import Target

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Request:
    """What one rank is asked to do."""

    rank: int
    world_size: int
    target: Target
    call: bytes  # its pickled arguments
    environment: dict[str, str]  # every variable that the rank is to see
    start_method: str | None  # of multiprocessing; None for Python's default
    init: str | None  # for init_process_group; None for no group
    timeout_s: float
    folder: str  # of this run, for the rendezvous and the rank's files


@dataclass(frozen=True)
class Outcome:
    """How the function ended in one rank."""

    kind: Literal["returned", "raised", "connection"]  # the last: an error that a peer's end brings
    moment: float  # of time.monotonic(), which all processes of a machine share
    value: bytes = b""  # the pickled return value
    exception_type: str = ""
    message: str = ""
    traceback: str = ""


def send_outcome(connection: Connection, outcome: Outcome) -> None:
    """Write ``outcome`` and its length to ``connection``; wait until the other side took it."""
    payload = pickle.dumps(outcome)
    for part in (_LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(connection.fileno(), view) :]


class Inbox:
    """Collects the bytes of one outcome as they arrive, without ever waiting for more."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received = bytearray()
        self.closed = False

    def read_available(self) -> Outcome | None:
        """Take what lies in the pipe; return the outcome once it is complete."""
        while not self.closed and self._connection.poll(0):
            try:
                chunk = os.read(self._connection.fileno(), _CHUNK_BYTES)
            except ConnectionError:
                chunk = b""
            self.closed = not chunk
            self._received += chunk
        return self._outcome()

    def _outcome(self) -> Outcome | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if len(self._received) < _LENGTH.size + length:
            return None
        outcome = pickle.loads(memoryview(self._received)[_LENGTH.size :])
        if not isinstance(outcome, Outcome):
            raise TypeError(f"a rank sent {type(outcome).__name__} where an Outcome was expected")
        return outcome


def output_path(folder: str, rank: int) -> str:
    """Return the file that takes the standard output and error of ``rank``."""
    return os.path.join(folder, f"rank{rank}.output")


def stack_path(folder: str, rank: int) -> str:
    """Return the file that takes the Python stacks of ``rank``."""
    return os.path.join(folder, f"rank{rank}.stack")


def rendezvous_path(folder: str) -> str:
    """Return the file through which the ranks find each other."""
    return os.path.join(folder, "rendezvous")


def text_of(path: str) -> str:
    """Return what was written to ``path``; nothing where a rank never opened it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
