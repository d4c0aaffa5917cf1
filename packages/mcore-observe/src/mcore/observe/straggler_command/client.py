"""Requests to straggler controllers, limited in time and size for any server."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from mcore.observe.straggler.server.token_file import find_token
from mcore.observe.terminal import plain

TOKEN_VARIABLE = "MCORE_STRAGGLER_TOKEN"
_MOST_BYTES = 256 * 1024 * 1024  # of a response, decompressed
MOST_TEXT = 200  # characters of an answer in a message
_ADDRESS = re.compile(r"(?:http://)?(?:\[([^\]/@]+)\]|([^:/@\[\]\s]+)):(\d{1,5})/?", re.ASCII)


class AnswerError(Exception):
    """There is no answer of a straggler controller. The text has the reason."""


@dataclass(frozen=True)
class Address:
    """Host and port of a controller."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT`` or ``[IPV6]:PORT``, also after ``http://``. Else ValueError."""
        match = _ADDRESS.fullmatch(text)
        port = int(match[3]) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise ValueError(
                f"{plain(text, MOST_TEXT)!r} is not an address; give HOST:PORT or [IPV6]:PORT"
            )
        return cls(match[1] or match[2], port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Response:
    """The response of a controller, and the time of its machine in seconds since 1970."""

    status: int
    text: str
    unix_time: float

    def json(self) -> dict[str, Any]:
        """Return the JSON object of the response. AnswerError for anything else."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise AnswerError(
                f"not a straggler controller: it answers {plain(self.text, MOST_TEXT)!r}"
            )
        return value

    def check(self) -> Response:
        """Return the response itself. AnswerError if the request was refused."""
        if self.status < 300:
            return self
        reason = plain(self.text, MOST_TEXT)
        with suppress(AnswerError):
            reason = plain(str(self.json().get("error", reason)), MOST_TEXT)
        hint = f" (set {TOKEN_VARIABLE} or --token-file)" if self.status == 401 else ""
        raise AnswerError(f"it answers {self.status}: {reason or 'no text'}{hint}")


class Client:
    """Sends requests to a controller. Several threads may use it.

    Without a token it sends that of the token file of the process that answers, if there is one.
    """

    def __init__(self, address: Address, *, token: str | None, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._token = token

    def request(self, method: str, path: str) -> Response:
        """Send a request. AnswerError unless the response is complete within the timeout."""
        connection = http.client.HTTPConnection(
            self.address.host, self.address.port, timeout=self._timeout_s
        )
        began = time.monotonic()
        try:
            connection.connect()
            left_s = max(0.01, self._timeout_s - (time.monotonic() - began))
            with _limit_time(left_s, connection.sock):
                return self._exchange(connection, method, path)
        except TimeoutError as error:
            raise AnswerError(f"no answer within {self._timeout_s:g} s") from error
        except socket.gaierror as error:
            raise AnswerError(f"unknown host name ({error.strerror})") from error
        except (OSError, UnicodeError) as error:
            raise AnswerError(str(getattr(error, "strerror", None) or error)) from error
        except http.client.HTTPException as error:
            text = plain(str(error), MOST_TEXT) or type(error).__name__
            raise AnswerError(f"not a straggler controller: {text}") from error
        finally:
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, method: str, path: str) -> Response:
        headers = {"Accept-Encoding": "gzip", "User-Agent": "mcore-straggler"}
        # The peer, not the given name: the name may lead to a process of another user.
        token = self._token or find_token(connection.sock.getpeername()[:2])
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        is_packed = response.getheader("Content-Encoding") == "gzip"
        body = _read_body(response, is_packed=is_packed)
        if response.length:  # bytes that were announced and are missing
            raise http.client.IncompleteRead(b"")
        try:
            unix_time = parsedate_to_datetime(response.getheader("Date", "")).timestamp()
        except (ValueError, TypeError, IndexError):
            unix_time = time.time()
        return Response(response.status, body.decode("utf-8", "replace"), unix_time)


@contextmanager
def _limit_time(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Shut a socket down at the end of a time, which also ends a pending read. TimeoutError then.

    A socket's timeout restarts with each byte, so a slow server could exceed it.
    """
    has_passed = threading.Event()

    def shut_down() -> None:
        has_passed.set()
        with suppress(OSError):  # it is closed
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if has_passed.is_set():  # it ends a body without length, too
            raise TimeoutError


def read_token(file: str | None) -> str | None:
    """Return the token in a file, or without a file the token in the environment, if any.

    ValueError if it does not fit into a header, OSError if the file cannot be read.
    """
    source = TOKEN_VARIABLE if file is None else file
    given = os.environ.get(TOKEN_VARIABLE) if file is None else Path(file).read_text("utf-8")
    token = (given or "").strip()
    if not token and file is None:
        return None
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(f"the token of {source} must be printable ASCII characters, at least one")
    return token


def _read_body(response: http.client.HTTPResponse, *, is_packed: bool) -> bytes:
    """Read a body to its end. AnswerError if it is too long, or announced as gzip but is not."""
    try:
        # A gzip body may have several members.
        source = gzip.GzipFile(fileobj=response) if is_packed else response
        body = source.read(_MOST_BYTES + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise AnswerError("not a straggler controller: its gzip is damaged") from error
    if len(body) > _MOST_BYTES:
        raise AnswerError(f"its answer has over {_MOST_BYTES} bytes")
    return body
