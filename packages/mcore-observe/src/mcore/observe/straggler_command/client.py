"""Requests to straggler controllers: bounded in time and size, whatever answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

TOKEN_VARIABLE = "MCORE_STRAGGLER_TOKEN"
_MOST_BYTES = 256 * 1024 * 1024  # of an answer, unpacked
_CHUNK_BYTES = 256 * 1024
_MOST_TEXT = 200
_ADDRESS = re.compile(r"(?:http://)?(?:\[([^\]/@]+)\]|([^:/@\[\]\s]+)):(\d{1,5})/?", re.ASCII)


class AnswerError(Exception):
    """No answer, or none of a straggler controller; the text says what came instead."""


@dataclass(frozen=True)
class Address:
    """Host and port of a controller."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT``, ``[IPV6]:PORT`` or that with ``http://``; ValueError otherwise."""
        found = _ADDRESS.fullmatch(text)
        port = int(found[3]) if found else 0
        if found is None or not 1 <= port <= 65535:
            raise ValueError(
                f"{plain(text)!r} is no address of a controller; give HOST:PORT or [IPV6]:PORT"
            )
        return cls(found[1] or found[2], port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a controller answered, and its own time in seconds since 1970."""

    status: int
    text: str
    unix_time: float

    def json(self) -> dict[str, Any]:
        """Return the object that the answer is; AnswerError for anything else."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise AnswerError(f"no straggler controller: it answers {plain(self.text)!r}")
        return value

    def checked(self) -> Answer:
        """Return the answer itself; AnswerError where the request was refused."""
        if self.status < 300:
            return self
        said = plain(self.text)
        with suppress(AnswerError):
            said = plain(str(self.json().get("error", said)))
        hint = f" ({TOKEN_VARIABLE} or --token-file gives the token)" if self.status == 401 else ""
        raise AnswerError(f"it answers {self.status}: {said or 'nothing'}{hint}")


class Client:
    """Asks one controller; safe to use from several threads."""

    def __init__(self, address: Address, *, token: str | None, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._headers = {"Accept-Encoding": "gzip", "User-Agent": "mcore-straggler"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, method: str, path: str) -> Answer:
        """Send a request; AnswerError unless its answer is whole within the timeout."""
        connection = http.client.HTTPConnection(
            self.address.host, self.address.port, timeout=self._timeout_s
        )
        began = time.monotonic()
        try:
            connection.connect()
            # A peer that sends a byte now and then would outlast the timeout of a socket.
            left_s = max(0.01, self._timeout_s - (time.monotonic() - began))
            with _Deadline(left_s, connection.sock) as deadline:
                try:
                    return self._exchange(connection, method, path)
                finally:
                    if deadline.has_passed:  # which also ends a body that has no length
                        raise TimeoutError
        except TimeoutError as error:
            raise AnswerError(f"no answer within {self._timeout_s:g} s") from error
        except socket.gaierror as error:
            raise AnswerError(f"no machine of this name ({error.strerror})") from error
        except (OSError, UnicodeError) as error:
            raise AnswerError(str(getattr(error, "strerror", None) or error)) from error
        except http.client.HTTPException as error:
            text = plain(str(error)) or type(error).__name__
            raise AnswerError(f"no straggler controller: {text}") from error
        finally:
            connection.close()

    def _exchange(self, connection: http.client.HTTPConnection, method: str, path: str) -> Answer:
        connection.request(method, path, headers=self._headers)
        response = connection.getresponse()
        is_packed = response.getheader("Content-Encoding") == "gzip"
        body = _unpacked(response.read, is_packed=is_packed)
        if response.length:  # of the bytes announced, those that did not come
            raise http.client.IncompleteRead(b"")
        return Answer(
            response.status, body.decode("utf-8", "replace"), _date(response.getheader("Date"))
        )


class _Deadline:
    """Shuts a socket when its time is over, so that whoever reads it gets an end."""

    def __init__(self, seconds: float, connection: socket.socket) -> None:
        self.has_passed = False
        self._connection = connection
        self._timer = threading.Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self.has_passed = True
        with suppress(OSError):  # closed meanwhile
            self._connection.shutdown(socket.SHUT_RDWR)


def token_of(file: str | None) -> str | None:
    """Return the token in a file, else that of the environment, if there is one.

    ValueError where it does not fit into a header, OSError where the file cannot be read.
    """
    source = TOKEN_VARIABLE if file is None else file
    given = os.environ.get(TOKEN_VARIABLE) if file is None else Path(file).read_text("utf-8")
    token = (given or "").strip()
    if not token and file is None:
        return None
    if not (token and token.isascii() and token.isprintable()):
        raise ValueError(f"the token of {source} must be printable ASCII characters, at least one")
    return token


def plain(text: str, most: int = _MOST_TEXT) -> str:
    """Return a text without what a terminal would obey, shortened."""
    shown = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def _unpacked(read: Callable[[int], bytes], *, is_packed: bool) -> bytes:
    """Read a body to its end; AnswerError where it is too long, or no gzip though announced."""
    body = bytearray()
    members = zlib.decompressobj(31)
    while chunk := read(_CHUNK_BYTES):
        while chunk:
            if len(body) > _MOST_BYTES:
                raise AnswerError(f"an answer over {_MOST_BYTES} bytes")
            if not is_packed:
                body += chunk
                break
            try:
                body += members.decompress(chunk, _MOST_BYTES)
            except zlib.error as error:
                raise AnswerError("no straggler controller: its gzip is damaged") from error
            chunk = members.unconsumed_tail or members.unused_data
            if members.eof:
                members = zlib.decompressobj(31)
    return bytes(body)


def _date(header: str | None) -> float:
    """Return the time of the answer by the clock of the controller's machine."""
    try:
        return parsedate_to_datetime(header or "").timestamp()
    except (ValueError, TypeError, IndexError):
        return time.time()
