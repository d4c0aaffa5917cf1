"""A rendezvous store outside torchrun's agents: ``python -m pretrain.cli.store HOST PORT``.

The loss of the agent that owns the store ends all agents. With ``--rdzv-conf is_host=0`` no agent
creates a store.
"""

from __future__ import annotations

import sys
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Serve until the process ends and print the port. Port 0 means any free port."""
    host, port = arguments
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
