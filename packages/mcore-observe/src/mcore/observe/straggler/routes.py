"""The controller's answers to requests, and the state that it shares with the detector."""

from __future__ import annotations

import functools
import gzip
import hmac
import ipaddress
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus

from mcore.observe.straggler.comparison import RankComparison
from mcore.observe.straggler.page.history import History
from mcore.observe.straggler.page.view import FILE_HEADERS, FILE_PATHS, PageView, page_file
from mcore.observe.straggler.prometheus import family, labels
from mcore.observe.straggler.report import StragglerReport

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ControllerStatus:
    """A snapshot of the detector for HTTP clients, with its fields in the order that they see."""

    enabled: bool
    pending: bool | None  # the state after the next report where that differs
    rank: int
    world_size: int
    reports: int
    last_report_unix: float | None


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
        self._last: RankComparison | None = None
        self._history: History | None = None

    def keep_history(self) -> History:
        """Keep the reports from now on, for the page; the first call starts it."""
        with self._lock:
            if self._history is None:
                self._history = History()
            return self._history

    @property
    def last_report(self) -> StragglerReport | None:
        """The last report; None before the first."""
        last = self._last
        return None if last is None else last.report

    def status(self) -> ControllerStatus:
        """Return a snapshot of the state."""
        with self._lock:
            return ControllerStatus(
                enabled=self._enabled,
                pending=None if self._wanted == self._enabled else self._wanted,
                rank=self._rank,
                world_size=self._world_size,
                reports=self._reports,
                last_report_unix=None if self._last is None else self._last.unix_time,
            )

    def refused(self) -> None:
        """Count a request with a token that is not the right one."""
        with self._lock:
            self._refused += 1

    def show(self, scalars: Mapping[str, float]) -> None:
        """Show numbers of the training to clients, until they are replaced."""
        with self._lock:
            self._scalars.update(scalars)
        if self._history is not None:
            self._history.show(scalars)

    def live_metrics(self) -> str:
        """Return what changes between reports, in Prometheus' text format."""
        status = self.status()
        with self._lock:
            refused, scalars = self._refused, list(self._scalars.items())
        made = [] if status.last_report_unix is None else [("", status.last_report_unix)]
        named = [(labels(name=name), value) for name, value in scalars]
        return "".join(
            (
                family("enabled", "gauge", "Whether ranges are timed.", [("", status.enabled)]),
                family("reports_total", "counter", "Reports so far.", [("", status.reports)]),
                family("refused_total", "counter", "Requests without the token.", [("", refused)]),
                family("last_report_timestamp_seconds", "gauge", "Time of the report.", made),
                family("training", "gauge", "Numbers of the training by name.", named),
            )
        )

    def request(self, wanted: bool) -> bool:
        """Ask for a state from the next report on, and return it; the last request counts."""
        with self._lock:
            self._wanted = wanted
            return wanted

    def toggle(self) -> bool:
        """Ask for the other state, and return it; a second call before a report undoes it."""
        with self._lock:
            self._wanted = not self._wanted
            return self._wanted

    def wanted(self) -> bool:
        """Return the state wanted after the next report."""
        with self._lock:
            return self._wanted

    def applied(self, enabled: bool, found: RankComparison | None) -> None:
        """Record the state that all ranks have now, and what a report found, if anything.

        A request made while that report was under way stays for the next one.
        """
        if found is not None and self._history is not None:
            self._history.add(found)
        with self._lock:
            self._enabled = enabled
            if found is not None:
                self._last = found
                self._reports += 1


@dataclass(frozen=True)
class Answer:
    """One response; ``packed`` is its body for clients that accept gzip."""

    status: HTTPStatus
    body: str
    content_type: str = _TEXT
    packed: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def error_answer(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Answer:
    """Return the answer to a request that is refused; the text repeats nothing that was sent."""
    return Answer(status, _json({"error": text}), _JSON, headers=headers or {})


class Router:
    """Answers requests from the shared state. No collective, no device."""

    def __init__(
        self, state: ControllerState, *, token: str | None, allow_get_toggle: bool
    ) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._rendered: dict[str, _Rendered] = {}
        self._page = PageView(state.keep_history())
        self._expected = None if token is None else token.encode()
        root = self._toggle if allow_get_toggle else self._status
        # By path and method, each from the query.
        self._routes: dict[str, dict[str, Callable[[str], Answer]]] = {
            "/": {"GET": lambda _: root()},
            "/status": {"GET": lambda _: self._status()},
            "/toggle": {"POST": lambda _: self._toggle()},
            "/on": {"POST": lambda _: _accepted(state.request(True))},
            "/off": {"POST": lambda _: _accepted(state.request(False))},
            "/report": {"GET": lambda _: self._report()},
            "/metrics": {"GET": lambda query: self._metrics("ranks=all" in query.split("&"))},
            "/healthz": {"GET": lambda _: Answer(HTTPStatus.OK, "ok")},
            "/ui/data": {"GET": lambda query: self._asked(self._data, query)},
            "/ui/rank": {"GET": lambda query: self._asked(self._page.rank, query)},
        }
        for path in FILE_PATHS:
            self._routes[path] = {"GET": functools.partial(_file, path)}

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
        """Return the answer 403 or 401 where a request may not be answered; nothing is changed.

        The page's files say nothing of the job, so that a browser, which has no token before it
        has asked for one, gets them without. A link may lead to the page itself (``is_visit``).
        """
        if is_cross_site and not (is_visit and (method, path) == ("GET", "/ui")):
            return error_answer(HTTPStatus.FORBIDDEN, "requests from web pages are refused")
        if (method, path) == ("GET", "/healthz"):
            return None
        if self._expected is None:
            # A page whose name leads to this machine could ask in a browser's name.
            if host is None or _is_address(host):
                return None
            return error_answer(HTTPStatus.FORBIDDEN, "ask for localhost or an address, not a name")
        if self._is_authorized(authorization) or (method == "GET" and path in FILE_PATHS):
            return None
        self._state.refused()
        return error_answer(
            HTTPStatus.UNAUTHORIZED,
            "send the header Authorization: Bearer <token>",
            {"WWW-Authenticate": "Bearer"},
        )

    def answer(self, method: str, path: str, query: str = "") -> Answer:
        """Do what a request asks for; 404 for another path, 405 for another method."""
        methods = self._routes.get(path)
        if methods is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no such path")
        if method not in methods:
            allowed = {"Allow": ", ".join(methods)}
            return error_answer(HTTPStatus.METHOD_NOT_ALLOWED, "no such method here", allowed)
        return methods[method](query)

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

    def _report(self) -> Answer:
        rendered = self._of_report("report", StragglerReport.to_json)
        if rendered is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no report yet")
        return Answer(HTTPStatus.OK, rendered.text, _JSON, rendered.packed)

    def _data(self, query: str) -> str:
        return self._page.data(query, asdict(self._state.status()))

    def _asked(self, ask: Callable[[str], str], query: str) -> Answer:
        try:
            body = ask(query)
        except ValueError as error:
            return error_answer(HTTPStatus.BAD_REQUEST, str(error))
        return Answer(HTTPStatus.OK, body, _JSON, gzip.compress(body.encode(), 1))

    def _metrics(self, all_ranks: bool) -> Answer:
        live = self._state.live_metrics()
        rendered = self._of_report(
            "all" if all_ranks else "metrics",
            lambda report: report.to_prometheus(all_ranks=all_ranks),
        )
        if rendered is None:
            return Answer(HTTPStatus.OK, live, _PROMETHEUS)
        packed = gzip.compress(live.encode(), 1) + rendered.packed  # members of one stream
        return Answer(HTTPStatus.OK, live + rendered.text, _PROMETHEUS, packed)

    def _of_report(self, what: str, render: Callable[[StragglerReport], str]) -> _Rendered | None:
        """Render the last report once, whoever asks how often; None before the first."""
        with self._lock:
            report = self._state.last_report
            if report is None:
                return None
            rendered = self._rendered.get(what)
            if rendered is None or rendered.report is not report:
                text = render(report)
                rendered = _Rendered(report, text, gzip.compress(text.encode(), 1))
                self._rendered[what] = rendered
            return rendered


@dataclass(frozen=True)
class _Rendered:
    """A report as text, plain and packed with gzip."""

    report: StragglerReport
    text: str
    packed: bytes


def _is_address(host: str) -> bool:
    """Return whether a Host header has an address or ``localhost``, with or without a port."""
    name = host.strip()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _file(path: str, query: str) -> Answer:
    text, content_type = page_file(path)
    return Answer(HTTPStatus.OK, text, content_type, headers=FILE_HEADERS)


def _accepted(wanted: bool) -> Answer:
    word = "ON" if wanted else "OFF"
    text = f"Will turn StragglerDetector {word} at next logging interval"
    return Answer(HTTPStatus.ACCEPTED, text)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
