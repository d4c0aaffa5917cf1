"""The controller of one process: whether it listens, where, and why not."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING

from mcore.observe.straggler.controller_state import ControllerState

if TYPE_CHECKING:
    from mcore.observe.straggler.controller import StragglerController

__all__ = ["Listener"]

logger = logging.getLogger("mcore.observe.straggler")

_TOKEN_VARIABLE = "MCORE_STRAGGLER_TOKEN"


class Listener:
    """Starts and stops the controller. A port that is in use is a warning, not an error.

    Args:
        bind: The address to listen on.
        port: The port; 0 takes a free one.
        token: What requests have to present; None reads ``MCORE_STRAGGLER_TOKEN``.
        allow_get_toggle: ``GET /`` toggles.

    Raises:
        ValueError: Other machines reach ``bind`` and there is no token.

    Attributes:
        error: Why it could not listen; None where it could or was not started.

    Example:
        >>> listener = Listener(bind="127.0.0.1", port=0, token=None, allow_get_toggle=False)
        >>> listener.start(ControllerState(rank=0, world_size=1, enabled=False))
        >>> listener.address[0]
        '127.0.0.1'
        >>> listener.close()
    """

    def __init__(self, *, bind: str, port: int, token: str | None, allow_get_toggle: bool) -> None:
        # The controller brings the standard library's HTTP server, which most ranks never need.
        from mcore.observe.straggler.controller import check_binding

        self._token = token if token is not None else os.environ.get(_TOKEN_VARIABLE) or None
        check_binding(bind, self._token)
        self._bind = bind
        self._port = port
        self._allow_get_toggle = allow_get_toggle
        self._server: StragglerController | None = None
        self.error: OSError | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that it listens on; None where it does not."""
        return None if self._server is None else self._server.address

    def start(self, state: ControllerState) -> None:
        """Listen, until :meth:`close` or the end of the process; while listening do nothing."""
        from mcore.observe.straggler.controller import StragglerController

        if self._server is not None:
            return
        self.error = None
        try:
            self._server = StragglerController(
                state,
                bind=self._bind,
                port=self._port,
                token=self._token,
                allow_get_toggle=self._allow_get_toggle,
            )
        except OSError as error:
            self.error = error
            logger.warning(
                "straggler controller cannot listen on %s:%d (%s); timing goes on without it",
                self._bind,
                self._port,
                error,
            )
        else:
            atexit.register(self.close)

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        server, self._server = self._server, None
        if server is not None:
            atexit.unregister(self.close)
            server.close()
