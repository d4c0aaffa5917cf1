"""A threaded HTTP server that no number of slow or silent clients can hold up."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import socket
import socketserver
import threading
import time
import weakref
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mcore.observe.straggler.routes import Answer, Router, error_answer

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
REQUEST_DEADLINE_S = 10.0

_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_MAX_BYTES = 8192  # of the request line, of all headers together, of the body
_SOCKET_TIMEOUT_S = 5.0
_PATIENCE_S = 0.5  # for a request, where others wait for a place
# Clients that read the answer close first, so that the port keeps no sockets in TIME_WAIT.
_GOODBYE_S = 0.25
_GOODBYE_BYTES = 8 * _MAX_BYTES


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.answer = error_answer(status, text)


class ControllerRequest(BaseHTTPRequestHandler):
    """One connection, which carries one request. What it sends is not logged."""

    timeout = _SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    server: ControllerServer
    server_version = "mcore"
    sys_version = ""

    def __init__(
        self,
        router: Router,
        request: socket.socket,
        client_address: Any,
        server: socketserver.BaseServer,
    ) -> None:
        self._router = router
        self.command = ""
        super().__init__(request, client_address, server)

    def handle(self) -> None:
        """Read the request, answer it, and wait a moment for the client to close."""
        try:
            self._answer_request()
            self._say_goodbye()
        except OSError as error:  # gone, or too slow
            logger.debug("a connection ended early: %s", type(error).__name__)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the standard library finds wrong, without repeating what was sent."""
        self._send(error_answer(HTTPStatus(code), HTTPStatus(code).phrase.lower()))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests carry the token."""

    def _answer_request(self) -> None:
        try:
            if not self._read_request():
                return
            self._read_body()
            self.server.has_asked(self.connection)
        except _RefusedError as refused:
            self._send(refused.answer)
        else:
            self._send(self._decide())

    def _decide(self) -> Answer:
        path, _, query = self.path.partition("?")
        refusal = self._router.refusal(
            self.command,
            path,
            host=self.headers.get("Host"),
            authorization=self.headers.get_all("Authorization", []),
            is_cross_site=self._is_cross_site(),
            is_visit=self.headers.get("Sec-Fetch-Dest") == "document",
        )
        return refusal or self._router.answer(self.command, path, query)

    def _is_cross_site(self) -> bool:
        # Browsers leave Origin out of plain GETs, such as those for images, and Sec-Fetch-Site out
        # of what they ask of plain HTTP, unless it is this machine.
        fetch_site = self.headers.get("Sec-Fetch-Site", "none").strip().lower()
        own_origin = f"http://{self.headers.get('Host')}"
        is_own = all(origin == own_origin for origin in self.headers.get_all("Origin", []))
        return not is_own or fetch_site not in ("none", "same-origin")

    def _read_request(self) -> bool:
        """Parse request line and headers; False if the client is gone or has its answer."""
        self.raw_requestline = self.rfile.readline(_MAX_BYTES + 1)
        if len(self.raw_requestline) > _MAX_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "request line over 8192 bytes")
        head = self._read_headers()
        if head is None:
            return False
        incoming, self.rfile = self.rfile, io.BytesIO(head)
        try:
            is_request = self.parse_request()
        finally:
            self.rfile = incoming
        if is_request and self.request_version == "HTTP/0.9":
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "no HTTP version in the request line")
        if is_request and len(self.headers.get_all("Host", [])) > 1:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "more than one Host")
        return is_request

    def _read_headers(self) -> bytes | None:
        head = bytearray()
        while True:
            line = self.rfile.readline(_MAX_BYTES + 1 - len(head))
            head += line
            if len(head) > _MAX_BYTES:
                raise _RefusedError(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers over 8192 bytes"
                )
            if line in (b"\r\n", b"\n"):
                return bytes(head)
            if not line.endswith(b"\n"):
                return None

    def _read_body(self) -> None:
        """Read what follows the headers, so that a request counts only when it is complete."""
        if "Transfer-Encoding" in self.headers:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(set(lengths)) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "not one valid Content-Length")
        if len(lengths[0]) > 10 or int(lengths[0]) > _MAX_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body over 8192 bytes")
        length = int(lengths[0])
        if len(self.rfile.read(length)) < length:
            raise ConnectionAbortedError("the body is shorter than its Content-Length")

    def _send(self, answer: Answer) -> None:
        body, packing = answer.body.encode(), {}
        if answer.packed is not None and self._accepts_gzip():
            body, packing = answer.packed, {"Content-Encoding": "gzip"}
        self.request_version = self.protocol_version  # the base class sends HTTP/0.9 no headers
        self.send_response_only(answer.status)
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            "Date": self.date_time_string(),
            **packing,
            **answer.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _accepts_gzip(self) -> bool:
        named = [one.partition(";") for one in self.headers.get("Accept-Encoding", "").split(",")]
        return any(
            name.strip().lower() == "gzip" and "".join(quality.split()) not in ("q=0", "q=0.0")
            for name, _, quality in named
        )

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _GOODBYE_S
        left = _GOODBYE_BYTES
        while left > 0 and (wait_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(wait_s)
            received = len(self.connection.recv(left))
            if received == 0:
                return
            left -= received


class ControllerServer(ThreadingHTTPServer):
    """Serves a router; each connection has a thread and a deadline, and their number is bounded."""

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
        self._opened_at: dict[socket.socket, float] = {}  # oldest first
        self._asked: set[socket.socket] = set()
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
        """Admit a connection, or turn it away without waiting for it.

        Where all places are taken, who has not finished asking for longest gives up the place.
        """
        now = time.monotonic()
        with self._lock:
            if len(self._opened_at) >= self._max_connections:
                self._cut_silent(now - _PATIENCE_S)
            if len(self._opened_at) < self._max_connections:
                self._opened_at[request] = now
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
        """Close a connection and free its place."""
        with self._lock:
            self._opened_at.pop(request, None)
            self._asked.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that are past their deadline; called several times a second."""
        self._cut(opened_before=time.monotonic() - self._request_deadline_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what went wrong in a request; training continues."""
        logger.debug("a request to the straggler controller failed", exc_info=True)

    def stop(self) -> None:
        """End ``serve_forever``, at once where the system allows it, else at its next poll."""
        with contextlib.suppress(OSError):  # systems other than Linux refuse this
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()

    def cut_all(self, wait_s: float) -> None:
        """Cut all connections and wait up to ``wait_s`` for their threads; only after ``stop``."""
        self._cut(opened_before=float("inf"))
        deadline = time.monotonic() + wait_s
        for thread in list(self._request_threads):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def has_asked(self, request: Any) -> None:
        """Remember that a request has arrived whole: it keeps its place until it is answered."""
        with self._lock:
            self._asked.add(request)

    def _cut_silent(self, opened_before: float) -> None:
        """Cut the oldest connection that has not asked yet, if it is old enough; holds the lock."""
        for connection, opened_at in self._opened_at.items():
            if opened_at < opened_before and connection not in self._asked:
                del self._opened_at[connection]
                with contextlib.suppress(OSError):  # the client was faster
                    connection.shutdown(socket.SHUT_RDWR)
                return

    def _cut(self, opened_before: float) -> None:
        # Under the lock no connection of the dictionary can be closed meanwhile.
        with self._lock:
            for connection, opened_at in self._opened_at.items():
                if opened_at < opened_before:
                    with contextlib.suppress(OSError):  # the client was faster
                        connection.shutdown(socket.SHUT_RDWR)
