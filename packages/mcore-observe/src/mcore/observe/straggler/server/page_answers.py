"""The files of the page, and the reports kept as JSON. No collective, no device."""

from __future__ import annotations

import base64
import itertools
import json
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import torch

from mcore.observe.straggler.server.page_history import MOST_ROWS, Episode, History

_FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/map.js": ("map.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
FILE_PATHS = frozenset(_FILES)
FILE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_MOST_SLOW = 64  # ranks in a list
_MOST_ANSWERS = 8  # kept for equal requests


def read_page_file(path: str) -> tuple[str, str]:
    """Return the text of one of ``FILE_PATHS`` and its content type."""
    name, content_type = _FILES[path]
    return (files(__package__) / "static" / name).read_text("utf-8"), content_type


@dataclass(frozen=True)
class _Query:
    """The parameters of a request of the page. ValueError for a value out of range."""

    values: dict[str, list[str]]

    def number(self, name: str, default: int, low: int, high: int) -> int:
        text = self.values.get(name, [str(default)])[-1]
        if not (text.isascii() and text.isdigit() and len(text) < 18 and low <= int(text) <= high):
            raise ValueError(f"{name} must be a whole number from {low} to {high}")
        return int(text)

    def ranks(self, world_size: int) -> range:
        first = self.number("first", 0, 0, world_size - 1)
        return range(first, self.number("end", world_size, first + 1, world_size))


class PageAnswers:
    """Answers the page's requests from a history. Equal requests are computed once per report."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._lock = threading.Lock()
        self._answers: dict[tuple[object, ...], dict[str, Any]] = {}

    def data(self, query: str, status: dict[str, Any]) -> str:
        """Return the state of the job, and the reports after ``since`` as columns of a map.

        Parameters: ``metric``, ranks from ``first`` to before ``end``, at most ``rows`` rows, and
        ``how`` (``worst`` or ``median``) for the value of a row. ValueError for a wrong query.
        """
        history, parameters = self._history, _Query(parse_qs(query))
        since = parameters.number("since", 0, 0, 10**15)
        answer: dict[str, Any] = {
            "epoch": history.epoch,
            "now": time.time(),
            "age_s": history.age_s(),
            "every_s": history.usual_gap_s(),
            **status,
            "slow": self._list_slow(),
            "recovered": [self._describe_episode(one) for one in history.recovered()],
            "scalars": [
                {"name": name, "value": _round(last), "points": [_round(one) for one in points]}
                for name, last, points in history.scalars()
            ],
        }
        if history.num_kept:
            how = parameters.values.get("how", ["worst"])[-1]
            if how not in ("worst", "median"):
                raise ValueError("how must be worst or median")
            metric = parameters.number("metric", 0, 0, len(history.metrics) - 1)
            rows = parameters.number("rows", MOST_ROWS, 1, MOST_ROWS)
            ranks = parameters.ranks(len(history.places))
            key = (history.num_reports, metric, ranks, since, how, rows)
            with self._lock:
                if key not in self._answers:
                    while len(self._answers) >= _MOST_ANSWERS:
                        del self._answers[next(iter(self._answers))]
                    columns = history.columns(
                        metric,
                        ranks,
                        since=since,
                        summary="worst" if how == "worst" else "median",
                        most_rows=rows,
                    )
                    self._answers[key] = _pack_columns(columns)
                answer["map"] = self._answers[key]
            answer["known"] = history.known()
            answer["oldest"] = history.num_reports - history.num_kept
            if since == 0:
                hosts = itertools.groupby(host for host, _ in history.places)
                answer["hosts"] = [[host, len(list(group))] for host, group in hosts]
                answer["metrics"] = [asdict(metric) for metric in history.metrics]
        return _dump(answer)

    def rank(self, query: str) -> str:
        """Return the values of a rank: of ``rank``, or of the worst rank of a range in ``report``.

        ValueError for a wrong query, and before the first report.
        """
        history, parameters = self._history, _Query(parse_qs(query))
        if not history.num_kept:
            raise ValueError("there is no report yet")
        world_size = len(history.places)
        metric = parameters.number("metric", 0, 0, len(history.metrics) - 1)
        if "rank" in parameters.values:
            rank = parameters.number("rank", 0, 0, world_size - 1)
        else:
            report = parameters.number("report", history.num_reports - 1, 0, 10**15)
            rank = history.worst_rank(metric, parameters.ranks(world_size), report)
        first, values = history.line(metric, rank)
        host, device = history.places[rank]
        latest = [[_round(own), _round(median)] for own, median in history.latest(rank)]
        return _dump(
            {
                "epoch": history.epoch,
                "rank": rank,
                "host": host,
                "device": device,
                "metric": metric,
                "first_report": first,
                "values": [_round(value) for value in values],
                "latest": latest,
            }
        )

    def _list_slow(self) -> dict[str, Any]:
        slow = self._history.slow()
        medians = self._history.medians() if slow else []
        numbers = {metric.name: at for at, metric in enumerate(self._history.metrics)}
        ranks = []
        for episode, outliers in slow[:_MOST_SLOW]:
            signs = [
                {
                    "metric": numbers.get(one.metric, 0),
                    "value": _round(one.value),
                    "median": _round(medians[numbers.get(one.metric, 0)]),
                    "z": _round(one.z),
                    "score": _round(one.score),
                }
                for one in outliers
            ]
            ranks.append({**self._describe_episode(episode), "signs": signs})
        return {"count": len(slow), "ranks": ranks, "measuring": self._history.is_measuring}

    def _describe_episode(self, episode: Episode) -> dict[str, Any]:
        host, device = self._history.places[episode.rank]
        return {**asdict(episode), "host": host, "device": device}


def _pack_columns(columns: dict[str, Any]) -> dict[str, Any]:
    codes: torch.Tensor = columns["codes"]
    packed = bytearray(codes.numel() * codes.element_size())
    if packed:  # frombuffer refuses an empty buffer, and numpy is no dependency
        torch.frombuffer(packed, dtype=codes.dtype).copy_(codes.flatten())
    return columns | {
        "times": [round(one, 3) for one in columns["times"]],
        "rows": codes.shape[-1],
        "low": _round_all(columns["low"]),
        "high": _round_all(columns["high"]),
        "spread": {name: _round_all(values) for name, values in columns["spread"].items()},
        "codes": base64.b64encode(packed).decode("ascii"),
    }


def _round_all(values: Iterable[float]) -> list[float | None]:
    return [_round(value) for value in values]


def _round(value: float) -> float | None:
    """Return a number with the digits of float32, None for NaN and infinity."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
