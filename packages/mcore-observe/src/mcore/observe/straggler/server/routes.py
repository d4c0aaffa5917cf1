"""The answers to requests, and the state that the controller shares with the detector."""

from __future__ import annotations

import functools
import gzip
import hmac
import ipaddress
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from mcore.observe.straggler.report import RankComparison, StragglerReport, family, labels
from mcore.observe.straggler.server.page_answers import (
    FILE_HEADERS,
    FILE_PATHS,
    PageAnswers,
    read_page_file,
)
from mcore.observe.straggler.server.page_history import History

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class ControllerState:
    """Holds the requested state until the next report applies it. Any thread may call it."""

    def __init__(self, *, rank: int, world_size: int, enabled: bool) -> None:
        self._lock = threading.Lock()
        self._rank = rank
        self._world_size = world_size
        self._enabled = enabled
        self._wanted = enabled
        self._reports = 0
        self._refused = 0
        self._scalars: dict[str, float] = {}
        self.last: RankComparison | None = None
        self._history: History | None = None

    def keep_history(self) -> History:
        """Return the history for the page. The first call starts it."""
        with self._lock:
            if self._history is None:
                self._history = History()
            return self._history

    @property
    def last_report(self) -> StragglerReport | None:
        """The last report. None before the first."""
        last = self.last
        return None if last is None else last.report

    def status(self) -> dict[str, Any]:
        """Return the JSON of ``/status``. ``pending`` is another state after the next report."""
        with self._lock:
            return {
                "enabled": self._enabled,
                "pending": None if self._wanted == self._enabled else self._wanted,
                "rank": self._rank,
                "world_size": self._world_size,
                "reports": self._reports,
                "last_report_unix": None if self.last is None else self.last.unix_time,
            }

    def count_refusal(self) -> None:
        """Count a request without the right token."""
        with self._lock:
            self._refused += 1

    def show(self, scalars: Mapping[str, float]) -> None:
        """Show numbers of the training to clients, until they are replaced."""
        with self._lock:
            self._scalars.update(scalars)
        if self._history is not None:
            self._history.show(scalars)

    def live_metrics(self) -> str:
        """Return the values that change between reports, in Prometheus' text format."""
        status = self.status()
        with self._lock:
            refused, scalars = self._refused, dict(self._scalars)
        made = [time for time in [status["last_report_unix"]] if time is not None]
        named, values = [labels(name=name) for name in scalars], [*scalars.values()]
        return "".join(
            family(name, kind, text, {"": samples})
            for name, kind, text, samples in (
                ("enabled", "gauge", "Whether ranges are timed.", ([""], [status["enabled"]])),
                ("reports_total", "counter", "Reports so far.", ([""], [status["reports"]])),
                ("refused_total", "counter", "Requests without the token.", ([""], [refused])),
                ("last_report_timestamp_seconds", "gauge", "Time of the report.", ([""], made)),
                ("training", "gauge", "Numbers of the training by name.", (named, values)),
            )
        )

    def request(self, wanted: bool) -> bool:
        """Request a state from the next report on, and return it. The last request counts."""
        with self._lock:
            self._wanted = wanted
            return wanted

    def toggle(self) -> bool:
        """Request the other state, and return it. A second call before a report undoes it."""
        with self._lock:
            self._wanted = not self._wanted
            return self._wanted

    def wanted(self) -> bool:
        """Return the state wanted after the next report."""
        with self._lock:
            return self._wanted

    def applied(self, enabled: bool, comparison: RankComparison | None) -> None:
        """Record the present state of all ranks, and the comparison of a report if there was any.

        A request made during that report is kept for the next report.
        """
        if comparison is not None and self._history is not None:
            self._history.add(comparison)
        with self._lock:
            self._enabled = enabled
            if comparison is not None:
                self.last = comparison
                self._reports += 1


@dataclass(frozen=True)
class Answer:
    """A response. ``packed`` is its body for clients that accept gzip."""

    status: HTTPStatus
    body: str
    content_type: str = _TEXT
    packed: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def error_answer(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Answer:
    """Return the answer to a request that is refused. The text repeats nothing of the request."""
    return Answer(status, _dump({"error": text}), _JSON, headers=headers or {})


class Router:
    """Answers requests from the shared state. No collective, no device."""

    def __init__(
        self,
        state: ControllerState,
        *,
        host: str = "127.0.0.1",
        token: str | None,
        allow_get_toggle: bool,
    ) -> None:
        self._state = state
        self._host = host
        self._lock = threading.Lock()
        self._rendered: dict[str, _Rendered] = {}
        self._page = PageAnswers(state.keep_history())
        self._expected = None if token is None else token.encode()
        root = self._toggle if allow_get_toggle else self._answer_status
        # By path and method, each from the query.
        self._routes: dict[str, dict[str, Callable[[str], Answer]]] = {
            "/": {"GET": lambda _: root()},
            "/status": {"GET": lambda _: self._answer_status()},
            "/toggle": {"POST": lambda _: self._toggle()},
            "/on": {"POST": lambda _: _accept(state.request(True))},
            "/off": {"POST": lambda _: _accept(state.request(False))},
            "/report": {"GET": self._answer_report},
            "/metrics": {
                "GET": lambda query: self._answer_metrics("ranks=all" in query.split("&"))
            },
            "/healthz": {"GET": lambda _: Answer(HTTPStatus.OK, "ok")},
            "/ui/data": {
                "GET": lambda query: self._answer_page(
                    lambda text: self._page.data(text, state.status()), query
                )
            },
            "/ui/rank": {"GET": lambda query: self._answer_page(self._page.rank, query)},
        }
        for path in FILE_PATHS:
            self._routes[path] = {"GET": functools.partial(_answer_file, path)}

    def refusal(
        self,
        method: str,
        path: str,
        *,
        host: str | None,
        authorization: list[str],
        is_cross_site: bool,
        is_visit: bool = False,
    ) -> Answer | None:
        """Return the answer 403 or 401 if a request is refused, else None. Nothing is changed.

        The page's files contain no data of the job. They need no token, because a browser has none
        until the page prompts for it. Links to the page itself are allowed (``is_visit``).
        """
        if is_cross_site and not (is_visit and (method, path) == ("GET", "/ui")):
            return error_answer(HTTPStatus.FORBIDDEN, "requests of other web pages are refused")
        if (method, path) == ("GET", "/healthz"):
            return None
        if self._expected is None:
            # DNS rebinding: a foreign page whose host name resolves to this machine counts as the
            # same site for a browser. Such a page needs a name, so names are refused. For 0.0.0.0
            # and [::ffff:127.0.0.1], which lead here too, browsers omit Sec-Fetch-Site.
            if host is None or self._is_listening_on(host):
                return None
            return error_answer(
                HTTPStatus.FORBIDDEN,
                "without a token, requests must go to localhost or the address that listens",
            )
        # Headers arrive decoded as latin-1: encoding gives the bytes that were sent.
        scheme, _, given = authorization[0].partition(" ") if authorization else ("", "", "")
        matches = hmac.compare_digest(given.strip().encode("latin-1"), self._expected)
        is_authorized = matches and len(authorization) == 1 and scheme.lower() == "bearer"
        if is_authorized or (method == "GET" and path in FILE_PATHS):
            return None
        self._state.count_refusal()
        text = "wrong token" if authorization else "send the header Authorization: Bearer <token>"
        return error_answer(HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})

    def answer(self, method: str, path: str, query: str = "") -> Answer:
        """Answer a request: 404 for an unknown path, 405 for an unknown method."""
        methods = self._routes.get(path)
        if methods is None:
            return error_answer(HTTPStatus.NOT_FOUND, "unknown path")
        if method not in methods:
            names = ("GET", "HEAD") if "GET" in methods else tuple(methods)
            allowed = {"Allow": ", ".join(names)}
            return error_answer(
                HTTPStatus.METHOD_NOT_ALLOWED, "this path has no such method", allowed
            )
        return methods[method](query)

    def _is_listening_on(self, host: str) -> bool:
        """Return whether a Host header is ``localhost`` or the address, with or without a port."""
        name = host.strip()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(name) == ipaddress.ip_address(self._host)
        except ValueError:
            return False

    def _answer_status(self) -> Answer:
        return Answer(HTTPStatus.OK, _dump(self._state.status()), _JSON)

    def _toggle(self) -> Answer:
        return _accept(self._state.toggle())

    def _answer_report(self, query: str) -> Answer:
        rendered = self._render("report", lambda comparison: comparison.report.to_json())
        if rendered is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no report yet")
        return Answer(HTTPStatus.OK, rendered.text, _JSON, rendered.packed)

    def _answer_page(self, ask: Callable[[str], str], query: str) -> Answer:
        try:
            body = ask(query)
        except ValueError as error:
            return error_answer(HTTPStatus.BAD_REQUEST, str(error))
        return Answer(HTTPStatus.OK, body, _JSON, gzip.compress(body.encode(), 1))

    def _answer_metrics(self, all_ranks: bool) -> Answer:
        live = self._state.live_metrics()
        rendered = self._render(
            "all" if all_ranks else "metrics",
            lambda comparison: comparison.to_prometheus(all_ranks=all_ranks),
        )
        if rendered is None:
            return Answer(HTTPStatus.OK, live, _PROMETHEUS)
        # A gzip stream may have several members, so the report is compressed only once.
        packed = gzip.compress(live.encode(), 1) + rendered.packed
        return Answer(HTTPStatus.OK, live + rendered.text, _PROMETHEUS, packed)

    def _render(self, form: str, render: Callable[[RankComparison], str]) -> _Rendered | None:
        """Render the last report, once for all clients. None before the first report."""
        with self._lock:
            last = self._state.last
            if last is None:
                return None
            rendered = self._rendered.get(form)
            if rendered is None or rendered.source is not last:
                text = render(last)
                rendered = _Rendered(last, text, gzip.compress(text.encode(), 1))
                self._rendered[form] = rendered
            return rendered


@dataclass(frozen=True)
class _Rendered:
    """A report as text, plain and packed with gzip."""

    source: RankComparison
    text: str
    packed: bytes


def _answer_file(path: str, query: str) -> Answer:
    text, content_type = read_page_file(path)
    return Answer(HTTPStatus.OK, text, content_type, headers=FILE_HEADERS)


def _accept(wanted: bool) -> Answer:
    word = "ON" if wanted else "OFF"
    text = f"Will turn StragglerDetector {word} at next logging interval"
    return Answer(HTTPStatus.ACCEPTED, text)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
