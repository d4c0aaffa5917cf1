"""Switches the straggler detector and shows its reports over HTTP, on one rank."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading

from mcore.observe.straggler.controller_answers import Router
from mcore.observe.straggler.controller_server import ControllerServer
from mcore.observe.straggler.controller_state import ControllerState

__all__ = ["StragglerController", "check_binding"]

_POLL_S = 0.5
_GOODBYE_S = 1.0


def check_binding(bind: str, token: str | None) -> None:
    """Raise unless a controller may listen on an address; nothing is opened.

    Args:
        bind: An IPv4 or IPv6 address or a host name; ``""`` is every IPv4 address.
        token: What clients have to present, or None.

    Raises:
        ValueError: ``bind`` is no address of this kind; it is reachable from other machines and
            there is no token; or the token is empty or cannot be sent in a header.

    Example:
        >>> check_binding("127.0.0.1", None)
        >>> check_binding("0.0.0.0", "s3cret")
    """
    _, addresses = _resolve(bind)
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ValueError("the controller's token must be printable ASCII characters, at least one")
    if token is not None and token != token.strip():
        raise ValueError("the controller's token begins or ends with a space; strip it")
    if token is None and not all(_is_loopback(address) for address in addresses):
        raise ValueError(
            f"the controller would listen on {bind!r}, reachable from other machines, without a "
            "token; give token=, or bind it to 127.0.0.1 and use an ssh tunnel"
        )


class StragglerController:
    """Listens for requests in a daemon thread, ``straggler``, from its construction to ``close``.

    ========================= =========================================================
    ``GET /``, ``/status``    the state as JSON; changes nothing
    ``POST /toggle``          the other state from the next report on; twice cancels out
    ``POST /on``, ``/off``    that state from the next report on
    ``GET /report``           the last report as JSON
    ``GET /metrics``          the last report for Prometheus
    ``GET /healthz``          ``ok``, without a token too
    ========================= =========================================================

    With a token all other requests need ``Authorization: Bearer <token>``. What a browser sends
    for a web page is refused. Requests read the stored state only: no collective, no device. At
    most 32 connections are served at a time, each for 10 seconds at most; line, headers and body
    may have 8 KiB each.

    Args:
        state: Shared with the detector.
        bind: The address to listen on; see :func:`check_binding`.
        port: The port; 0 is any free one.
        token: What clients have to present, or None. It is not logged.
        allow_get_toggle: ``GET /`` toggles, as ``curl host:port`` does for Megatron-LM.

    Attributes:
        address: Host and port it listens on.

    Raises:
        ValueError: As :func:`check_binding`, and for a port outside 0..65535.
        OSError: The address cannot be bound, such as a port in use.

    Example:
        >>> from urllib.request import urlopen
        >>> state = ControllerState(rank=0, world_size=1, enabled=False)
        >>> controller = StragglerController(
        ...     state, bind="127.0.0.1", port=0, token=None, allow_get_toggle=False
        ... )
        >>> host, port = controller.address
        >>> urlopen(f"http://{host}:{port}/toggle", data=b"").read().decode()
        'Will turn StragglerDetector ON at next logging interval'
        >>> controller.close()
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
            raise ValueError(f"got port {port}; expected 0..65535, 0 for any free one")
        family, addresses = _resolve(bind)
        router = Router(state, token=token, allow_get_toggle=allow_get_toggle)
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
        """Stop listening, cut open connections and free the port; the second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        if os.getpid() == self._pid:  # a fork copies the socket but not the thread
            self._server.stop()
            thread.join()
            self._server.cut_all(_GOODBYE_S)
        self._server.server_close()


def _resolve(bind: str) -> tuple[socket.AddressFamily, list[str]]:
    """Return the family of the first address that a name stands for, and all of that family."""
    try:
        found = socket.getaddrinfo(
            bind or "0.0.0.0", None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the controller cannot listen on {bind!r} ({error}); give an address of this machine"
        ) from error
    family = found[0][0]
    return family, [str(address[0]) for kind, _, _, _, address in found if kind == family]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
