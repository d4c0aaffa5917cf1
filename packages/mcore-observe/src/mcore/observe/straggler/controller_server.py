"""A threaded HTTP server that no number of slow or silent clients can hold up."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
import socketserver
import threading
import time
import weakref
from http.server import ThreadingHTTPServer
from typing import Any

from mcore.observe.straggler.controller_answers import Router
from mcore.observe.straggler.controller_request import ControllerRequest

__all__ = ["ControllerServer"]

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
REQUEST_DEADLINE_S = 10.0

_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class ControllerServer(ThreadingHTTPServer):
    """Serves a router; each connection has a thread and a deadline, and their number a bound.

    Args:
        family: ``socket.AF_INET`` or ``socket.AF_INET6``.
        address: Host and port to listen on; port 0 is any free one.
        router: What answers.
        max_connections: Further ones get 503 at once.
        request_deadline_s: After this a connection is cut, however little it still sends.

    Raises:
        OSError: The address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        router: Router,
        *,
        max_connections: int = MAX_CONNECTIONS,
        request_deadline_s: float = REQUEST_DEADLINE_S,
    ) -> None:
        self.address_family = family
        self._max_connections = max_connections
        self._request_deadline_s = request_deadline_s
        self._opened_at: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._request_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        super().__init__(address, functools.partial(ControllerRequest, router))

    def server_bind(self) -> None:
        """Bind, without the name look-up of the base class, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; a process without descriptors waits rather than spins."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Admit a connection, or turn it away without waiting for it."""
        with self._lock:
            if len(self._opened_at) < self._max_connections:
                self._opened_at[request] = time.monotonic()
                return True
        request.setblocking(False)
        try:
            request.send(_BUSY)
        except OSError as error:
            logger.debug("a surplus connection ended early: %s", type(error).__name__)
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread that :meth:`cut_all` knows."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="straggler request",
            daemon=True,
        )
        self._request_threads.add(thread)
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and give its place back."""
        with self._lock:
            self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that are past their deadline; called several times a second."""
        self._cut(opened_before=time.monotonic() - self._request_deadline_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what went wrong in a request; training goes on."""
        logger.debug("a request to the straggler controller failed", exc_info=True)

    def stop(self) -> None:
        """End ``serve_forever``, at once where the system can; else with its next look."""
        with contextlib.suppress(OSError):  # systems other than Linux refuse this
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()

    def cut_all(self, wait_s: float) -> None:
        """Cut all connections and wait for their threads; only after ``stop``.

        Args:
            wait_s: How long to wait at most.
        """
        self._cut(opened_before=float("inf"))
        deadline = time.monotonic() + wait_s
        for thread in list(self._request_threads):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _cut(self, opened_before: float) -> None:
        # Under the lock no connection of the dictionary can be closed meanwhile.
        with self._lock:
            for connection, opened_at in self._opened_at.items():
                if opened_at < opened_before:
                    with contextlib.suppress(OSError):  # the client was faster
                        connection.shutdown(socket.SHUT_RDWR)
