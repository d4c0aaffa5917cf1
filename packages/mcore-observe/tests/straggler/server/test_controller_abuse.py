"""What hostile clients can do to a job that reports: nothing."""

import contextlib
import io
import json
import os
import random
import socket
import statistics
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from mcore.observe.straggler.detector import StragglerDetector
from mcore.observe.straggler.server import http
from mcore.observe.straggler.server.controller import StragglerController
from mcore.observe.straggler.server.http import ControllerRequest
from mcore.observe.straggler.server.routes import ControllerState
from rank_testing import run_ranks

TOKEN = "0123456789abcdef0123456789abcdef"
NUM_REQUESTS = 20_000
NUM_OVER_TCP = 1_500
NUM_HALF_OPEN = 12
NUM_BURST = 150
REFUSALS = {400, 401, 403, 411, 413, 414, 431, 503, 505}
PATHS = ["/", "/on", "/off", "/toggle", "/status", "/report", "/metrics", "/../on"]
PATHS += ["/ui", "/ui/on", "/ui/data", "/ui/data?since=x", "/ui/rank?rank=0", "/ui/../on"]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


def guessed_token(rng):
    return rng.choice(["", TOKEN[:-1], TOKEN + "0", TOKEN[::-1], TOKEN.upper(), "x" * 5000])


def wrong_request(rng):
    method = rng.choice(["GET", "POST", "POST", "POST", "PUT", "HEAD", "OPTIONS", "DELETE"])
    path = rng.choice(PATHS)
    lines = [f"{method} {path} HTTP/1.{rng.randint(0, 1)}", f"Host: h{rng.random()}"]
    if rng.random() < 0.7:
        scheme = rng.choice(["Bearer", "bearer", "Basic", ""])
        lines.append(f"Authorization: {scheme} {guessed_token(rng)}")
    if rng.random() < 0.3:
        lines.append(f"Content-Length: {rng.choice([0, 3, -1, 8192, 10**9, 'x'])}")
    if rng.random() < 0.1:
        lines.append("Transfer-Encoding: chunked")
    return ("\r\n".join(lines) + "\r\n\r\n" + "abc" * rng.randint(0, 2)).encode()


def cross_site_request(rng):
    """With the right token: what a page could make a browser send that knows it."""
    method, path = rng.choice([("POST", "/on"), ("POST", "/toggle"), ("GET", "/"), ("GET", "/off")])
    mark = rng.choice(
        [
            "Origin: http://evil.example",
            "Origin: null",
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: document",
            "Host: 127.0.0.1:1\r\nOrigin: http://127.0.0.1:2",
        ]
    )
    return (f"{method} {path} HTTP/1.1\r\n{mark}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n").encode()


def mutated_request(rng):
    data = bytearray(wrong_request(rng))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(data))
        end = min(len(data), place + rng.randint(0, 4))
        data[place:end] = rng.randbytes(rng.randint(0, 4))
        data = data or bytearray(b"\n")
    return bytes(data)


def garbage(rng):
    return rng.randbytes(rng.randint(1, 400)) + rng.choice([b"", b"\n\n", b"\r\n\r\n"])


def oversized_request(rng):
    size = rng.randint(8200, 30_000)
    return rng.choice(
        [
            b"GET /" + b"a" * size + b" HTTP/1.0\r\n\r\n",
            b"POST /on HTTP/1.0\r\nX: " + b"a" * size + b"\r\n\r\n",
            b"POST /on HTTP/1.0\r\n" + b"X: a\r\n" * (size // 6) + b"\r\n",
            b"POST /on HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size,
            b"\x00" * size,
        ]
    )


def truncated_request(rng):
    data = wrong_request(rng)
    return data[: rng.randrange(len(data))]


KINDS = [
    wrong_request,
    cross_site_request,
    mutated_request,
    garbage,
    oversized_request,
    truncated_request,
    lambda rng: b"",
]


def one_request(address, data, manner):
    """Send something; return the status of the answer, or None without one."""
    with socket.create_connection(address, timeout=300) as client:
        try:
            if data:
                client.sendall(data)
            if manner == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            if manner != "read":
                return None
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(len("HTTP/1.1 400"), socket.MSG_WAITALL)
        except (ConnectionError, TimeoutError):
            return None
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None


def slow_clients(address, stop):
    """Hold connections half open and feed some of them a byte now and then."""
    clients = []
    while not stop.wait(0.05):
        while len(clients) < NUM_HALF_OPEN:
            with contextlib.suppress(OSError):
                client = socket.create_connection(address, timeout=300)
                client.sendall(b"POST /on HTTP/1.0\r\nAuthorization: Bearer ")
                clients.append(client)
        for client in clients[::2]:
            try:
                client.send(b"a")
            except OSError:  # cut off: open another
                client.close()
                clients.remove(client)
    for client in clients:
        client.close()


def ask_healthz(address):
    url = f"http://{address[0]}:{address[1]}/healthz"
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=120) as response:
                return response.read()
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def attack(address):
    rng, statuses = random.Random(20_000), Counter()
    stop = threading.Event()
    slow = threading.Thread(target=slow_clients, args=(address, stop), daemon=True)
    slow.start()
    for number in range(NUM_OVER_TCP):
        data = rng.choice(KINDS)(rng)
        manner = rng.choices(["read", "close", "reset"], [8, 1, 1])[0]
        statuses[one_request(address, data, manner)] += 1
        if number % 500 == 0:
            assert ask_healthz(address) == b"ok"
    burst = [socket.create_connection(address, timeout=300) for _ in range(NUM_BURST)]
    time.sleep(0.5)
    for client in burst:
        client.close()
    stop.set()
    slow.join()
    assert ask_healthz(address) == b"ok"
    return statuses


def count_resources():
    return len(os.listdir("/dev/fd")), threading.active_count()


def wait_for_resources(before):
    """Wait until no more are held: what else has threads and files may have fewer by then."""
    deadline = time.monotonic() + 120
    while any(now > then for now, then in zip(count_resources(), before, strict=True)):
        assert time.monotonic() < deadline, (before, count_resources())
        time.sleep(0.05)


def report_until(detector, group, is_over, pause_s=0.0):
    """Report on both ranks until rank 0 says so; the times of the reports in seconds."""
    durations, over = [], torch.zeros(1)
    while not over.item():
        with detector:
            time.sleep(0.001)
        started = time.perf_counter()
        detector.report(total_flops=1e9, log_interval=1)
        durations.append(time.perf_counter() - started)
        assert detector.enabled
        over.fill_(float(is_over(len(durations))))
        dist.broadcast(over, src=0, group=group)
        time.sleep(pause_s)
    return durations


def report_under_attack(group, rank, port, done_file):
    http._WRONG_TOKEN_S = 0.0  # every second request has a wrong token
    detector = StragglerDetector()
    detector.configure(
        world=2,
        rank=rank,
        port=0,
        enabled=True,
        group=group,
        token=TOKEN,
        allow_get_toggle=True,
        telemetry=lambda: (float("nan"),) * 4,
    )
    quiet = report_until(detector, group, lambda count: count >= 50)
    if rank == 0:
        port.fill_(detector.controller_address[1])
        assert ask_healthz(detector.controller_address) == b"ok"
        time.sleep(0.5)  # until the connection is let go of
    before = count_resources()
    dist.broadcast(port, src=0)
    attacked = report_until(detector, group, lambda _: os.path.exists(done_file), pause_s=0.02)
    wait_for_resources(before)
    still = ask_healthz(detector.controller_address) if rank == 0 else b"ok"
    has_request = detector.toggle
    detector.close()
    return statistics.median(quiet), statistics.median(attacked), len(attacked), has_request, still


def abused_job(done_file):
    rank, port = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    group = dist.new_group([0, 1])
    if rank < 2:
        return report_under_attack(group, rank, port, done_file)
    dist.broadcast(port, src=0)
    try:
        return attack(("127.0.0.1", int(port.item())))
    finally:
        with open(done_file, "w"):
            pass


@pytest.mark.slow
def test_hostile_requests_change_and_leak_nothing_while_ranks_report(tmp_path):
    *reporting, statuses = run_ranks(abused_job, 3, str(tmp_path / "done"), timeout_s=500)
    assert statuses.total() == NUM_OVER_TCP
    assert set(statuses) <= {None, 200, *REFUSALS}
    assert min(statuses[code] for code in REFUSALS - {503, 505}) > 0
    for quiet_s, attacked_s, reports, has_request, still in reporting:
        assert attacked_s < max(2.0, 50 * quiet_s)
        assert reports > 0
        assert has_request is False
        assert still == b"ok"


class Bytes:
    """A connection that has sent some bytes and no more: without a system call for each."""

    def __init__(self, data):
        self._data, self.answer = data, b""

    def makefile(self, *_):
        return io.BytesIO(self._data)

    def sendall(self, data):
        self.answer += bytes(data)

    def recv(self, size):
        return b""

    def settimeout(self, seconds):
        """It never waits."""

    def setsockopt(self, *option):
        """It has none."""


@pytest.fixture
def served(simulated_job):
    """A controller with three reports and a request that waits, and what it would tell."""
    state = ControllerState(rank=0, world_size=4, enabled=True)
    controller = StragglerController(
        state, bind="127.0.0.1", port=0, token=TOKEN, allow_get_toggle=True
    )
    job = simulated_job(4)
    for number in range(3):
        times = torch.arange(28.0, dtype=torch.float64).view(7, 4) + 1
        state.applied(True, job.report(times, unix_time=float(number)))
    state.show({"lm loss": 2.5})
    yield state, controller
    controller.close()


def test_20_000_hostile_requests_change_nothing(served, monkeypatch):
    """Each read by the handler that serves every connection."""
    monkeypatch.setattr(http, "_WRONG_TOKEN_S", 0.0)
    state, controller = served
    server, rng, statuses = controller._server, random.Random(20_000), Counter()
    page = server.router._page

    def told():
        shown = json.loads(page.data("", {}))
        return state.status(), page.rank("rank=1"), {**shown, "now": 0, "age_s": 0}

    before, resources = told(), count_resources()
    for number in range(NUM_REQUESTS):
        connection = Bytes(rng.choice(KINDS)(rng))
        ControllerRequest(connection, ("127.0.0.1", number), server)
        answer = connection.answer
        statuses[int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None] += 1
        assert b"lm loss" not in answer
    server._complete.clear()  # as the thread of a connection does at its end
    assert statuses.total() == NUM_REQUESTS
    assert set(statuses) <= {None, 200, *REFUSALS}
    assert min(statuses[401], statuses[403]) > 2000
    assert statuses[200] > 0  # the page's files
    assert told() == before
    wait_for_resources(resources)
