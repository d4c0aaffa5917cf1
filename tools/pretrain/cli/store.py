"""A rendezvous store outside torchrun's agents: ``python -m pretrain.cli.store HOST PORT``.

The loss of the agent that owns the store ends all agents. With ``--rdzv-conf is_host=0`` no agent
creates a store.
"""

from __future__ import annotations

import socket
import sys
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Serve on one address until the process ends and print the port. Port 0: any free port.

    Whoever reaches the port can run code in the job: the store has no passwords.
    """
    store = open_store(arguments[0], int(arguments[1]))
    print(store.port, flush=True)
    threading.Event().wait()


def open_store(host: str, port: int = 0) -> TCPStore:
    """A store that listens on one address."""
    # Without a socket of ours, the store would listen on all addresses.
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, port), family=family)
    return TCPStore(
        host, listening.getsockname()[1], is_master=True, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
