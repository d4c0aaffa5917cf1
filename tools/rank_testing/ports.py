"""A port for a server that another process is about to start."""

import random
import socket

_CANDIDATES = range(10_000, 32_000)  # Linux hands out ports from 32768 on, others from 49152 on
_ATTEMPTS = 100


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free and stays free.

    A port that the system chooses for a bind to port 0 may be given to another process before the
    server starts. Ports outside that range are only taken by processes that name their number.
    """
    for port in random.SystemRandom().sample(_CANDIDATES, _ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"{_ATTEMPTS} ports of 127.0.0.1 are in use; end some servers")
