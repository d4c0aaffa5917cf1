"""What the test process and its ranks send to each other."""

import os
import pickle
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from rank_testing.target import Target

_LENGTH = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Request:
    """What one rank is asked to do.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks.
        target: the function to call.
        call: its pickled `(args, kwargs)`.
        environment: every environment variable that the rank is to see.
        start_method: how `multiprocessing` starts processes unless told; None for Python's default.
        init: what to hand to `init_process_group`; None for no group.
        timeout_s: seconds until the test process gives up.
        folder: the folder of this run, for the rendezvous and the rank's files.
    """

    rank: int
    world_size: int
    target: Target
    call: bytes
    environment: dict[str, str]
    start_method: str | None
    init: str | None
    timeout_s: float
    folder: str


@dataclass(frozen=True)
class Outcome:
    """How the function ended in one rank.

    Attributes:
        kind: "returned", "raised", or "connection" for an error that another rank's end brings.
        moment: `time.monotonic()` of the end, which all processes of a machine share.
        value: the pickled return value.
        exception_type: the name of the exception's class.
        message: the text of the exception.
        traceback: the traceback as Python prints it.
    """

    kind: Literal["returned", "raised", "connection"]
    moment: float
    value: bytes = b""
    exception_type: str = ""
    message: str = ""
    traceback: str = ""


def send_outcome(connection: Connection, outcome: Outcome) -> None:
    """Write `outcome` and its length to `connection`; wait until the other side took it."""
    payload = pickle.dumps(outcome)
    for part in (_LENGTH.pack(len(payload)), payload):
        view = memoryview(part)
        while view:
            view = view[os.write(connection.fileno(), view) :]


class Inbox:
    """Collects the bytes of one outcome as they arrive, without ever waiting for more.

    Args:
        connection: the test process's end of the pipe to a rank.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received = bytearray()
        self.closed = False

    def read_available(self) -> Outcome | None:
        """Take what lies in the pipe; return the outcome once it is whole.

        Call it when the pipe is ready to be read, or to drain it after the rank's end.
        """
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
