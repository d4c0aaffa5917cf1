"""A threaded HTTP server that no number of slow or silent clients can block."""

from __future__ import annotations

import contextlib
import errno
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

from mcore.observe.straggler.server.routes import Answer, Router, error_answer

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
_PATIENCE_S = 0.5  # for a request while all places are taken
# The side that closes first keeps the socket in TIME_WAIT: clients get a moment to do so.
_GOODBYE_S = 0.25
_GOODBYE_BYTES = 8 * _MAX_BYTES
_WRONG_TOKEN_S = 0.5  # between two answers to wrong tokens


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.answer = error_answer(status, text)


class ControllerRequest(BaseHTTPRequestHandler):
    """One connection with one request. Its content is not logged."""

    timeout = _SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    server: ControllerServer
    server_version = "mcore"
    sys_version = ""
    command = ""  # before a request line is read

    def handle(self) -> None:
        """Read the request, answer it, and wait a moment for the client to close."""
        try:
            try:
                if self._read_request():
                    self._read_body()
                    self._send(self._answer())
            except _RefusedError as refused:
                self._send(refused.answer)
            # Wait for the client to close. Limited, else it could keep the place.
            deadline, left = time.monotonic() + _GOODBYE_S, _GOODBYE_BYTES
            while left > 0 and (wait_s := deadline - time.monotonic()) > 0:
                self.connection.settimeout(wait_s)
                received = len(self.connection.recv(left))
                left = left - received if received else 0
        except OSError as error:  # gone, or too slow
            logger.debug("a connection ended early: %s", type(error).__name__)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the standard library refuses, without repeating its content."""
        self._send(error_answer(HTTPStatus(code), HTTPStatus(code).phrase.lower()))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests carry the token."""

    def _answer(self) -> Answer:
        method, (path, _, query) = self.command, self.path.partition("?")
        if method == "HEAD":  # the answer to GET without its body. It never toggles
            method, path = "GET", "/status" if path == "/" else path
        # Browsers omit Origin in plain GETs, such as those for images. They omit Sec-Fetch-Site in
        # requests to plain HTTP, except to this machine.
        fetch_site = self.headers.get("Sec-Fetch-Site", "none").strip().lower()
        page_origin = f"http://{self.headers.get('Host')}"
        is_page = all(origin == page_origin for origin in self.headers.get_all("Origin", []))
        refusal = self.server.router.refusal(
            method,
            path,
            host=self.headers.get("Host"),
            authorization=self.headers.get_all("Authorization", []),
            is_cross_site=not is_page or fetch_site not in ("none", "same-origin"),
            is_visit=self.headers.get("Sec-Fetch-Dest") == "document",
        )
        if refusal is not None and refusal.status == HTTPStatus.UNAUTHORIZED:
            # Not marked as complete: other requests may take its place.
            if "Authorization" in self.headers:
                self.server.delay_refusal()
            return refusal
        self.server.mark_complete(self.connection)
        return refusal or self.server.router.answer(method, path, query)

    def _read_request(self) -> bool:
        """Parse request line and headers. False if the client is gone or was answered."""
        self.raw_requestline = self.rfile.readline(_MAX_BYTES + 1)
        if len(self.raw_requestline) > _MAX_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "request line over 8192 bytes")
        # The base class would read up to 100 lines of 64 KiB, so it gets the headers from memory.
        head = self._read_headers()
        if head is None:
            return False
        incoming, self.rfile = self.rfile, io.BytesIO(head)
        try:
            is_request = self.parse_request()
        finally:
            self.rfile = incoming
        if is_request and self.request_version == "HTTP/0.9":
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "the request line has no HTTP version")
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
                # Some parsers end a line at a bare CR, others do not: they would disagree.
                if b"\r" in (self.raw_requestline + head).replace(b"\r\n", b""):
                    raise _RefusedError(HTTPStatus.BAD_REQUEST, "a CR without LF")
                return bytes(head)
            if not line.endswith(b"\n"):
                return None

    def _read_body(self) -> None:
        """Read the body. A request counts only when it is complete."""
        if "Transfer-Encoding" in self.headers:
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(set(lengths)) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "not exactly one valid Content-Length")
        if len(lengths[0]) > 10 or int(lengths[0]) > _MAX_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body over 8192 bytes")
        length = int(lengths[0])
        if len(self.rfile.read(length)) < length:
            raise ConnectionAbortedError("the body is shorter than its Content-Length")

    def _send(self, answer: Answer) -> None:
        body, packing = answer.body.encode(), {}
        if answer.packed is not None:  # else there may be no headers
            codings = self.headers.get("Accept-Encoding", "").split(",")
            for name, _, quality in (coding.partition(";") for coding in codings):
                is_refused = "".join(quality.split()) in ("q=0", "q=0.0")
                if name.strip().lower() == "gzip" and not is_refused:
                    body, packing = answer.packed, {"Content-Encoding": "gzip"}
        self.request_version = self.protocol_version  # else the base class omits headers for 0.9
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


class ControllerServer(ThreadingHTTPServer):
    """Serves a router. Each connection has a thread and a deadline. Their number is limited."""

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
        self.router = router
        self._max_connections = max_connections
        self._request_deadline_s = request_deadline_s
        self._opened_at: dict[socket.socket, float] = {}  # oldest first
        self._complete: set[socket.socket] = set()  # connections whose request was read
        self._lock = threading.Lock()
        self._refusing = threading.Lock()
        self._request_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        super().__init__(address, ControllerRequest)

    def server_bind(self) -> None:
        """Bind without the name look-up of the base class, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Without file descriptors, wait instead of spinning."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Admit a connection, or refuse it without waiting for it.

        If all places are taken, the oldest connection with an incomplete request is cut.
        """
        now = time.monotonic()
        with self._lock:
            if len(self._opened_at) >= self._max_connections:
                for connection, opened_at in self._opened_at.items():
                    if opened_at < now - _PATIENCE_S and connection not in self._complete:
                        del self._opened_at[connection]
                        with contextlib.suppress(OSError):  # the client closed it
                            connection.shutdown(socket.SHUT_RDWR)
                        break
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
        """Answer in a thread that :meth:`cut_all` can join."""
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
            self._complete.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that are past their deadline. Called several times a second."""
        self._cut(opened_before=time.monotonic() - self._request_deadline_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error of a request at DEBUG. Training continues."""
        logger.debug("a request to the straggler controller failed", exc_info=True)

    def stop(self) -> None:
        """End ``serve_forever``: immediately if the system allows it, else at its next poll."""
        with contextlib.suppress(OSError):  # systems other than Linux refuse this
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()

    def cut_all(self, wait_s: float) -> None:
        """Cut all connections, and wait up to ``wait_s`` for their threads. Only after ``stop``."""
        self._cut(opened_before=float("inf"))
        deadline = time.monotonic() + wait_s
        for thread in list(self._request_threads):
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def delay_refusal(self) -> None:
        """Wait, one request at a time, before the answer to a wrong token."""
        with self._refusing:
            time.sleep(_WRONG_TOKEN_S)

    def mark_complete(self, request: Any) -> None:
        """Let a request that was read keep its place until it is answered."""
        with self._lock:
            self._complete.add(request)

    def _cut(self, opened_before: float) -> None:
        # The lock keeps the connections of the dictionary open.
        with self._lock:
            for connection, opened_at in self._opened_at.items():
                if opened_at < opened_before:
                    with contextlib.suppress(OSError):  # the client closed it
                        connection.shutdown(socket.SHUT_RDWR)
