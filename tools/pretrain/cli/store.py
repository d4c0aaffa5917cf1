"""A store where torchrun's agents meet and that none of them owns: ``... HOST PORT``.

Whoever has it, of the agents, cannot be lost: ``--rdzv-conf is_host=0`` has none of them make one.
"""

from __future__ import annotations

import sys
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Serve until the process is ended; prints the port, which 0 leaves to the system."""
    host, port = arguments
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
