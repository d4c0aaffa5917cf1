"""Describe an exception to the test process, and tell a cause from a consequence."""

import re
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Literal

from rank_testing.messages import Outcome

_CONNECTION_TYPES = ("DistNetworkError", "DistStoreError")
# Gloo's and NCCL's words for a peer that is gone or does not answer. Their other errors, such as
# tensors of different sizes, are causes.
_CONNECTION_TEXT = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|pair closure"
    r"|timed out waiting \d+ ?ms|connectFullMesh failed|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)


def failed(error: BaseException, without_frames_of: str) -> Outcome:
    """Return the outcome of a rank that raised ``error``.

    An error counts as a lost connection if the first error of its chain is one: neither a wrapper
    around it nor an error while cleaning up after something else changes what went wrong first.
    """
    kind: Literal["raised", "connection"]
    kind = "connection" if _is_connection_error(_root(error)) else "raised"
    return Outcome(
        kind,
        time.monotonic(),
        exception_type=type(error).__qualname__,
        message=_text(error),
        traceback=_formatted(error, _position(error, without_frames_of)),
    )


def _root(error: BaseException) -> BaseException:
    *_, first = _chain(error)
    return first


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        context = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or context


def _is_connection_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or type(error).__name__ in _CONNECTION_TYPES:
        return True
    return isinstance(error, RuntimeError) and bool(_CONNECTION_TEXT.search(_text(error)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its text cannot be read: {type(broken).__name__}>"


def _position(error: BaseException, without_frames_of: str) -> TracebackType | None:
    position = error.__traceback__
    while position is not None and position.tb_frame.f_code.co_filename == without_frames_of:
        position = position.tb_next
    return position


def _formatted(error: BaseException, position: TracebackType | None) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, position))
    except Exception as broken:
        return f"<the traceback cannot be printed: {type(broken).__name__}>"
