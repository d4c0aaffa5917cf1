"""Reads one HTTP request within limits, and writes the answer to it."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from mcore.observe.straggler.controller_answers import Answer, Router, error_answer

__all__ = ["ControllerRequest"]

logger = logging.getLogger(__name__)

_MAX_BYTES = 8192  # of the request line, of all headers together, of the body
_SOCKET_TIMEOUT_S = 5.0
# Clients that read the answer close first, so that the port keeps no sockets in TIME_WAIT.
_GOODBYE_S = 0.25
_GOODBYE_BYTES = 8 * _MAX_BYTES


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.answer = error_answer(status, text)


class ControllerRequest(BaseHTTPRequestHandler):
    """One connection, which carries one request. What it sends is not logged.

    Args:
        router: Answers it.
        request: The connection.
        client_address: Whose it is.
        server: What accepted it.
    """

    timeout = _SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
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
        except _RefusedError as refused:
            self._send(refused.answer)
        else:
            self._send(self._decide())

    def _decide(self) -> Answer:
        path = self.path.partition("?")[0]
        refusal = self._router.refusal(
            self.command,
            path,
            authorization=self.headers.get_all("Authorization", []),
            is_cross_site=self._is_cross_site(),
        )
        return refusal or self._router.answer(self.command, path)

    def _is_cross_site(self) -> bool:
        # Browsers leave Origin out of plain GETs, such as those for images.
        fetch_site = self.headers.get("Sec-Fetch-Site", "none").strip().lower()
        return "Origin" in self.headers or fetch_site not in ("none", "same-origin")

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
        """Take in what follows the headers, so that a request counts only when it is whole."""
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
        body = answer.body.encode()
        self.request_version = self.protocol_version  # the base class sends HTTP/0.9 no headers
        self.send_response_only(answer.status)
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            "Date": self.date_time_string(),
            **answer.headers,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _GOODBYE_S
        left = _GOODBYE_BYTES
        while left > 0 and (wait_s := deadline - time.monotonic()) > 0:
            self.connection.settimeout(wait_s)
            received = len(self.connection.recv(left))
            if received == 0:
                return
            left -= received
