"""The readers, each as a function of the bytes of a file or request."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable
from pathlib import Path

from mcore.observe.sinks import records_of
from mcore.observe.sinks.delivery.spool import read_spool
from mcore.observe.straggler.server.http import ControllerRequest, ControllerServer
from mcore.observe.straggler.server.routes import ControllerState, Router
from mcore.parallel.checkpoint import CheckpointingException, is_complete_checkpoint
from mcore.parallel.checkpoint.files.manifest import _AFTER, _END, _HEADER, decode_manifest
from mcore.parallel.checkpoint.files.pieces import checksum_of
from pretrain.cli.checks import check
from pretrain.settings import Settings, read_settings
from pretrain.text.cache import TokenCache, open_cache, read_borders
from pretrain.usage import UsageError

_MOST_REQUEST_BYTES = 1 << 16  # fits into the buffers of a connection


def read_manifest(content: bytes, folder: Path) -> None:
    """Read the lines of a manifest whose checksum is right."""
    body = _HEADER + content
    with contextlib.suppress(CheckpointingException):
        index = decode_manifest(folder, body + _END + checksum_of(body).encode() + _AFTER)
        list(index.keys.values())  # a key is checked when it is looked up


def answer_request(content: bytes, folder: Path) -> None:
    """Answer the bytes of a connection to the straggler controller."""
    server = _make_server()
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        connection, address = server.get_request()
        client.sendall(content[:_MOST_REQUEST_BYTES])
        client.shutdown(socket.SHUT_WR)
        with connection:
            ControllerRequest(connection, address, server)


@functools.cache
def _make_server() -> ControllerServer:
    state = ControllerState(rank=0, world_size=2, enabled=True)
    router = Router(state, token=None, allow_get_toggle=False)
    return ControllerServer(socket.AF_INET, ("127.0.0.1", 0), router)


def read_cache_facts(content: bytes, folder: Path) -> None:
    """Read the facts of a token cache."""
    cache = TokenCache(folder, "key")
    cache.facts.write_bytes(content)
    cache.tokens.write_bytes(bytes(64))
    cache.borders.write_bytes(bytes(64))
    for read in (open_cache, read_borders):
        with contextlib.suppress(UsageError):
            read(cache)


def _read_file(
    name: str, read: Callable[[Path], object], *expected: type[Exception]
) -> Callable[[bytes, Path], None]:
    """The reader of a file in a folder."""

    def read_content(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        with contextlib.suppress(*expected):
            read(folder)

    return read_content


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "manifest": read_manifest,
    "index": _read_file(".metadata", is_complete_checkpoint),  # of torch
    "spool": _read_file("spool", lambda folder: read_spool(folder / "spool")),
    "metrics": _read_file("metrics.jsonl", lambda folder: [*records_of(folder / "metrics.jsonl")]),
    "http": answer_request,
    "cache": read_cache_facts,
    "config": _read_file(
        "config.json", lambda folder: check(Settings(**read_settings(folder)), None), UsageError
    ),
}
