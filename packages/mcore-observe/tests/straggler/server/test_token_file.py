"""Who can read and switch a controller on loopback: processes of its user, with the token file."""

import http.client
import os
import signal
import socket
import stat
import threading

import pytest

from mcore.observe.straggler.server.controller import Listener
from mcore.observe.straggler.server.routes import ControllerState
from mcore.observe.straggler.server.token_file import TokenFile, find_token
from mcore.observe.straggler_command.__main__ import main
from rank_testing.scripts import Script

JOB = """
import time
from mcore.observe.straggler.server.controller import Listener
from mcore.observe.straggler.server.routes import ControllerState
listener = Listener(bind="127.0.0.1", port=0, token=None, allow_get_toggle=False)
listener.start(ControllerState(rank=0, world_size=1, enabled=False))
print(listener.address[1], "is open", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("MCORE_STRAGGLER_TOKEN", raising=False)
    return tmp_path / "caches" / "mcore-straggler"


@pytest.fixture
def listen():
    started = []

    def start(**changes):
        settings = {"bind": "127.0.0.1", "port": 0, "token": None, "allow_get_toggle": False}
        listener = Listener(**{**settings, **changes})
        state = ControllerState(rank=0, world_size=1, enabled=False)
        listener.start(state)
        started.append(listener)
        return listener, state

    yield start
    for listener in started:
        listener.close()


def status_of(address, token=None):
    connection = http.client.HTTPConnection(*address, timeout=120)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request("POST", "/on", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_controller_without_a_token_makes_one_for_its_user(listen, caches, capsys):
    listener, state = listen()
    host, port = listener.address
    assert status_of(listener.address) == 401
    assert state.wanted() is False
    (file,) = caches.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, caches)] == [0o600, 0o700]
    token = file.read_text().strip()
    assert len(token) == 32
    assert main(["on", f"{host}:{port}"]) == 0
    assert state.wanted() is True
    assert token not in "".join(capsys.readouterr())
    assert status_of(listener.address, token) == 202
    listener.close()
    assert list(caches.iterdir()) == []
    assert listen()[0].address is not None


def test_files_of_dead_processes_are_removed_by_the_next_start(listen, caches):
    killed, living = Script(JOB), Script(JOB)
    for job in (killed, living):
        job.wait_until_printed("is open\n", 300)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(300)
    foreign = caches / "another-machine-127.0.0.1-5000"
    foreign.write_text("token")
    before = set(caches.iterdir())
    listen()
    after = set(caches.iterdir())
    assert foreign in after  # the locks of other machines are not known here
    assert len(before - after) == len(after - before) == 1
    os.kill(living.pid, signal.SIGKILL)
    living.wait(300)


def test_given_tokens_and_toggles_by_get_need_no_file(listen, caches, monkeypatch):
    assert status_of(listen(allow_get_toggle=True)[0].address) == 202
    assert status_of(listen(token="t")[0].address, "t") == 202
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "e")
    assert status_of(listen()[0].address, "e") == 202
    assert not caches.exists()


def test_a_process_that_took_the_port_gets_no_token(caches):
    job = Script(JOB)
    job.wait_until_printed("is open")
    address = ("127.0.0.1", int(job.printed.split()[0]))
    assert find_token(address) == next(caches.iterdir()).read_text().strip()
    assert main(["status", "{}:{}".format(*address), "--timeout", "120"]) == 0
    job.send(signal.SIGKILL)
    job.wait()
    assert len(list(caches.iterdir())) == 1  # left behind
    received = []

    def take_all(server):
        connection, _ = server.accept()
        with connection:
            while b"\r\n\r\n" not in b"".join(received):
                received.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        thread = threading.Thread(target=take_all, args=(server,))
        thread.start()
        assert main(["status", "{}:{}".format(*address), "--timeout", "120"]) == 1
        thread.join()
    assert b"GET /status" in b"".join(received)
    assert b"uthorization" not in b"".join(received)
    assert list(caches.iterdir()) == []


def test_another_address_with_the_same_port_gets_no_token(listen):
    _, port = listen()[0].address
    assert find_token(("127.0.0.1", port)) is not None
    assert find_token(("::1", port)) is find_token(("127.0.0.2", port)) is None


@pytest.mark.parametrize("wrong", ["open to others", "a link", "a file"])
def test_a_folder_that_others_can_change_is_not_used(listen, caches, caplog, wrong):
    caches.parent.mkdir()
    if wrong == "a file":
        caches.write_text("")
    elif wrong == "a link":
        (caches.parent / "elsewhere").mkdir(mode=0o700)
        caches.symlink_to(caches.parent / "elsewhere")
    else:
        caches.mkdir()
        caches.chmod(0o750)
    listener, _ = listen()
    assert listener.address is None
    assert isinstance(listener.error, OSError)
    assert "timing continues without it" in caplog.text


def test_a_fork_leaves_the_file(caches):
    file = TokenFile(("127.0.0.1", 9), "t")
    child = os.fork()
    if child == 0:
        file.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert find_token(("127.0.0.1", 9)) == "t"
    file.remove()
    assert list(caches.iterdir()) == []
