"""Tests of finding a port for a server."""

import socket

import pytest

from rank_testing import free_port, ports


def test_a_server_can_take_the_port_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        taken = server.getsockname()[1]
        other = free_port()
        monkeypatch.setattr(ports, "_ATTEMPTS", 2)
        monkeypatch.setattr(ports, "_CANDIDATES", (taken, other))
        assert free_port() == other
