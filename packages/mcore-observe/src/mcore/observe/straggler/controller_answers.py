"""What the controller answers to each request, apart from HTTP itself."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus

from mcore.observe.straggler.controller_state import ControllerState
from mcore.observe.straggler.prometheus import prometheus_text

__all__ = ["Answer", "Router", "error_answer"]

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        status: The HTTP status.
        body: The text of the body.
        content_type: Its type.
        headers: Further headers.
    """

    status: HTTPStatus
    body: str
    content_type: str = _TEXT
    headers: dict[str, str] = field(default_factory=dict)


def error_answer(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Answer:
    """Make the answer to a request that is refused.

    Args:
        status: The HTTP status.
        text: What is wrong, for ``{"error": text}``; nothing that the client sent.
        headers: Further headers.

    Returns:
        The answer.

    Example:
        >>> error_answer(HTTPStatus.NOT_FOUND, "no report yet").body
        '{"error":"no report yet"}'
    """
    return Answer(status, _json({"error": text}), _JSON, headers or {})


class Router:
    """Answers requests from the shared state. No collective, no device.

    Args:
        state: Shared with the detector.
        token: What clients must present, or None.
        allow_get_toggle: Let ``GET /`` do what ``POST /toggle`` does.
    """

    def __init__(
        self, state: ControllerState, *, token: str | None, allow_get_toggle: bool
    ) -> None:
        self._state = state
        self._expected = None if token is None else token.encode()
        root = self._toggle if allow_get_toggle else self._status
        self._routes: dict[str, dict[str, Callable[[], Answer]]] = {
            "/": {"GET": root},
            "/status": {"GET": self._status},
            "/toggle": {"POST": self._toggle},
            "/on": {"POST": self._on},
            "/off": {"POST": self._off},
            "/report": {"GET": self._report},
            "/metrics": {"GET": self._metrics},
            "/healthz": {"GET": self._healthz},
        }

    def refusal(
        self, method: str, path: str, *, authorization: list[str], is_cross_site: bool
    ) -> Answer | None:
        """Say why a request may not be answered, if so; nothing is changed.

        Args:
            method: The request's method.
            path: The request's path.
            authorization: Its Authorization headers.
            is_cross_site: Whether a browser sent it for the page of some site.

        Returns:
            The answer 403 or 401, or None.
        """
        if is_cross_site:
            return error_answer(HTTPStatus.FORBIDDEN, "requests from web pages are refused")
        if (method, path) == ("GET", "/healthz") or self._is_authorized(authorization):
            return None
        return error_answer(
            HTTPStatus.UNAUTHORIZED,
            "send the header Authorization: Bearer <token>",
            {"WWW-Authenticate": "Bearer"},
        )

    def answer(self, method: str, path: str) -> Answer:
        """Do what a request asks for.

        Args:
            method: The request's method.
            path: The request's path, without a query.

        Returns:
            The answer; 404 for another path, 405 for another method.
        """
        methods = self._routes.get(path)
        if methods is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no such path")
        if method not in methods:
            allowed = {"Allow": ", ".join(methods)}
            return error_answer(HTTPStatus.METHOD_NOT_ALLOWED, "no such method here", allowed)
        return methods[method]()

    def _is_authorized(self, authorization: list[str]) -> bool:
        if self._expected is None:
            return True
        # Headers arrive decoded as latin-1: encoding gives the bytes that were sent.
        scheme, _, given = authorization[0].partition(" ") if authorization else ("", "", "")
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self._expected)
        return matches and len(authorization) == 1 and scheme.lower() == "bearer"

    def _status(self) -> Answer:
        return Answer(HTTPStatus.OK, _json(asdict(self._state.status())), _JSON)

    def _toggle(self) -> Answer:
        return _accepted(self._state.toggle())

    def _on(self) -> Answer:
        return _accepted(self._state.request(True))

    def _off(self) -> Answer:
        return _accepted(self._state.request(False))

    def _report(self) -> Answer:
        report = self._state.last_report
        if report is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no report yet")
        return Answer(HTTPStatus.OK, report.to_json(), _JSON)

    def _metrics(self) -> Answer:
        text = prometheus_text(self._state.status(), self._state.last_report)
        return Answer(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")

    def _healthz(self) -> Answer:
        return Answer(HTTPStatus.OK, "ok")


def _accepted(wanted: bool) -> Answer:
    word = "ON" if wanted else "OFF"
    text = f"Will turn StragglerDetector {word} at next logging interval"
    return Answer(HTTPStatus.ACCEPTED, text)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
