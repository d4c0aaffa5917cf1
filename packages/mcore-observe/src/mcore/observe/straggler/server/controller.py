"""The thread that serves the endpoint, and the addresses on which it may listen."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import secrets
import socket
import threading

from mcore.observe.straggler.server.http import ControllerServer
from mcore.observe.straggler.server.routes import ControllerState, Router
from mcore.observe.straggler.server.token_file import TokenFile

logger = logging.getLogger("mcore.observe.straggler")

_TOKEN_VARIABLE = "MCORE_STRAGGLER_TOKEN"
_POLL_S = 0.5
_GOODBYE_S = 1.0
_SHORTEST_TOKEN = 16  # characters, on addresses that other machines can reach


def check_binding(bind: str, token: str | None) -> None:
    """Raise ValueError unless a controller may listen on an address. Nothing is opened.

    An address that other machines can reach needs a token of 16 characters or more. A token must
    fit into a header.
    """
    _, addresses = _resolve(bind)
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("the controller's token must be printable ASCII characters, at least one")
    if token is not None and token != token.strip():
        raise ValueError("the controller's token begins or ends with a space: strip it")
    # An IPv6 address may have a scope after a percent sign.
    hosts = (ipaddress.ip_address(address.partition("%")[0]) for address in addresses)
    if all(host.is_loopback for host in hosts):
        return
    if token is None:
        raise ValueError(
            f"the controller would listen on {bind!r} without a token, reachable from other "
            "machines: give token=, or bind it to 127.0.0.1 and use an ssh tunnel"
        )
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(
            f"the controller's token has {len(token)} characters and {bind!r} is reachable from "
            f"other machines: give {_SHORTEST_TOKEN} characters or more, such as those of "
            "secrets.token_urlsafe()"
        )


class StragglerController:
    """Listens for requests in a daemon thread, ``straggler``, from its construction to ``close``.

    Requests read only the stored state: no collective, no device. At most 32 connections are served
    at a time, for at most 10 seconds each.
    """

    def __init__(
        self,
        state: ControllerState,
        *,
        bind: str,
        port: int,
        token: str | None,
        allow_get_toggle: bool,
    ) -> None:
        check_binding(bind, token)
        if not 0 <= port <= 65535:
            raise ValueError(f"got port {port}, expected 0..65535, 0 for any free one")
        family, addresses = _resolve(bind)
        router = Router(state, host=addresses[0], token=token, allow_get_toggle=allow_get_toggle)
        self._server = ControllerServer(family, (addresses[0], port), router)
        host, bound_port = self._server.server_address[:2]
        self.address: tuple[str, int] = (str(host), bound_port)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="straggler", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, cut open connections and free the port. A second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        if os.getpid() == self._pid:  # a fork copies the socket but not the thread
            self._server.stop()
            thread.join()
            self._server.cut_all(_GOODBYE_S)
        self._server.server_close()


class Listener:
    """Starts and stops the controller of a process. A port that is in use is only a warning.

    Without a token, in the environment either, each start writes a random one to a file that
    ``mcore-straggler`` reads. With ``allow_get_toggle`` alone, requests need none.
    """

    def __init__(self, *, bind: str, port: int, token: str | None, allow_get_toggle: bool) -> None:
        self._token = token if token is not None else os.environ.get(_TOKEN_VARIABLE) or None
        check_binding(bind, self._token)
        self._bind = bind
        self._port = port
        self._allow_get_toggle = allow_get_toggle
        self._server: StragglerController | None = None
        self._file: TokenFile | None = None
        self.error: OSError | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port on which it listens. None if it does not listen."""
        return None if self._server is None else self._server.address

    def start(self, state: ControllerState) -> None:
        """Listen until :meth:`close` or the end of the process. No effect while listening."""
        if self._server is not None:
            return
        self.error = None
        has_file = self._token is None and not self._allow_get_toggle
        token = secrets.token_urlsafe(24) if has_file else self._token
        try:
            self._server = StragglerController(
                state,
                bind=self._bind,
                port=self._port,
                token=token,
                allow_get_toggle=self._allow_get_toggle,
            )
            if has_file and token is not None:
                self._file = TokenFile(self._server.address, token)
                logger.info("the token of the straggler controller is in %s", self._file.path)
        except OSError as error:
            self.close()
            self.error = error
            logger.warning(
                "straggler controller cannot listen on %s:%d (%s); timing continues without it",
                self._bind,
                self._port,
                error,
            )
        else:
            atexit.register(self.close)

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.remove()
        server, self._server = self._server, None
        if server is not None:
            atexit.unregister(self.close)
            server.close()


def _resolve(bind: str) -> tuple[socket.AddressFamily, list[str]]:
    """Return the family of the first address of a name, and all addresses of that family."""
    try:
        resolved = socket.getaddrinfo(
            bind or "0.0.0.0", None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the controller cannot listen on {bind!r} ({error}): give an address of this machine"
        ) from error
    family = resolved[0][0]
    return family, [str(address[0]) for kind, _, _, _, address in resolved if kind == family]
