import gzip
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from mcore.observe import SectionStats, StragglerReport
from mcore.observe.straggler.server import http as http_module
from mcore.observe.straggler.server.controller import StragglerController, check_binding
from mcore.observe.straggler.server.http import ControllerRequest, ControllerServer
from mcore.observe.straggler.server.routes import ControllerState
from rank_testing import free_port
from rank_testing.scripts import run_script

ON = "Will turn StragglerDetector ON at next logging interval"
OFF = "Will turn StragglerDetector OFF at next logging interval"
WAIT_S = 120.0  # for what comes at once on a machine that has time


def make_report(host='node"1"\\a'):
    nan = float("nan")
    columns = {
        "elapsed_ms": (10.0, 15.0),
        "data_ms": (1.0, 2.0),
        "temp_c": (40.0, nan),
        "power_w": (300.0, nan),
        "util_pct": (90.0, nan),
        "clock_mhz": (1500.0, nan),
        "etpt_tf": (20.0, 13.0),
    }
    stats = SectionStats(count=10, sum_ms=100.0, median_ms=10.0, max_ms=12.0)
    return StragglerReport(
        unix_time=1.7e9,
        world_size=2,
        log_interval=10,
        total_flops=1e12,
        hosts=(host, "node2"),
        metrics=columns,
        sections={"compute": (stats, stats)},
        relative_scores={"compute": (1.0, 0.66)},
        individual_scores={"compute": (1.0, nan)},
        outliers=(),
    )


@pytest.fixture
def start():
    started = []

    def starter(state=None, **changes):
        state = state or ControllerState(rank=0, world_size=2, enabled=False)
        settings = {"bind": "127.0.0.1", "port": 0, "token": None, "allow_get_toggle": False}
        controller = StragglerController(state, **{**settings, **changes})
        started.append(controller)
        return state, controller.address

    yield starter
    for controller in started:
        controller.close()


def ask(address, method, path, headers=None, body=None):
    connection = http.client.HTTPConnection(*address, timeout=WAIT_S)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def ask_raw(address, data):
    """The whole answer to raw bytes; b"" when the connection is closed without one."""
    with socket.create_connection(address, timeout=WAIT_S) as client:
        client.sendall(data)
        answer = b""
        try:
            while chunk := client.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
        return answer


def status_code(answer):
    return int(answer.split(b" ", 2)[1]) if answer else None


@pytest.mark.parametrize("path", ["/", "/status", "/status?pretty=1"])
def test_status_changes_nothing(start, path):
    state, address = start()
    expected = {
        "enabled": False,
        "pending": None,
        "rank": 0,
        "world_size": 2,
        "reports": 0,
        "last_report_unix": None,
    }
    for _ in range(10):
        response, body = ask(address, "GET", path)
        assert response.status == 200
        assert response.getheader("Content-Type") == "application/json"
        assert json.loads(body) == expected
        assert list(json.loads(body)) == list(expected)
    assert state.wanted() is False


def test_toggle_on_and_off(start):
    state, address = start()
    for method, path, body, wanted in [
        ("POST", "/toggle", ON, True),
        ("POST", "/toggle", OFF, False),
        ("POST", "/on", ON, True),
        ("POST", "/on", ON, True),
        ("POST", "/off", OFF, False),
        ("POST", "/off", OFF, False),
        ("POST", "/on?now", ON, True),
    ]:
        response, text = ask(address, method, path)
        assert (response.status, text, state.wanted()) == (202, body, wanted)
        assert response.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert text.split()[3] == "ON"
    assert json.loads(ask(address, "GET", "/status")[1])["pending"] is True
    state.applied(True, None)
    status = json.loads(ask(address, "GET", "/status")[1])
    assert (status["enabled"], status["pending"]) == (True, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::ffff:127.0.0.1"])
def test_an_image_of_a_web_page_does_not_toggle(start, host):
    """As a browser fetches it: without Origin, and without Sec-Fetch-Site for such addresses."""
    state, (_, port) = start(allow_get_toggle=True)
    assert ask((host, port), "GET", "/", {"Accept": "image/*"})[0].status == 403
    assert state.wanted() is False


def test_get_toggles_only_where_that_is_allowed(start):
    state, address = start(allow_get_toggle=True)
    assert ask(address, "GET", "/")[1] == ON
    assert state.wanted() is True
    assert ask(address, "GET", "/")[1].split()[3] == "OFF"
    assert state.wanted() is False
    assert json.loads(ask(address, "GET", "/status")[1])["pending"] is None


def test_report_and_metrics(start, compared):
    state, address = start()
    response, body = ask(address, "GET", "/report")
    assert (response.status, body) == (404, '{"error":"no report yet"}')
    report = make_report()
    state.applied(True, compared(report))
    response, body = ask(address, "GET", "/report")
    assert response.status == 200
    assert response.getheader("Content-Type") == "application/json"
    assert json.loads(body) == json.loads(report.to_json())
    status = json.loads(ask(address, "GET", "/status")[1])
    assert (status["reports"], status["last_report_unix"]) == (1, 1.7e9)


SAMPLE = re.compile(
    r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)+)\})? (NaN|[-+0-9.e]+)'
)


def test_metrics_hold_to_the_format_line_by_line(start, compared):
    state, address = start()
    state.applied(True, compared(make_report()))
    response, body = ask(address, "GET", "/metrics")
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    assert body.endswith("\n")
    described, values = {"HELP": set(), "TYPE": set()}, {}
    for line in body.splitlines():
        if line.startswith("# "):
            _, kind, name, _ = line.split(" ", 3)
            described[kind].add(name)
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        assert name in described["HELP"]
        assert name in described["TYPE"]
        values[name, labels] = value
    prefix = "mcore_straggler_"
    assert float(values[f"{prefix}enabled", None]) == 1
    assert float(values[f"{prefix}reports_total", None]) == 1
    by_name = {}
    for (name, labels), value in values.items():
        by_name.setdefault(name.removeprefix(prefix), {})[labels] = value
    first = 'host="node\\"1\\"\\\\a"'
    (slow,) = [v for k, v in by_name["iteration_seconds"].items() if 'rank="1"' in k]
    (hertz,) = [v for k, v in by_name["gpu_clock_hertz"].items() if first in k]
    (unknown,) = [v for k, v in by_name["gpu_power_watts"].items() if 'rank="1"' in k]
    assert (float(slow), float(hertz), unknown) == (0.015, 1.5e9, "NaN")


def test_healthz_other_paths_and_other_methods(start):
    state, address = start()
    response, body = ask(address, "GET", "/healthz")
    assert (response.status, body) == (200, "ok")
    for path in ("/nothing", "/toggle/", "/../toggle", "/%74oggle", "*", "/status/x"):
        assert ask(address, "POST", path)[0].status == 404
    for method, path, allowed in [
        ("GET", "/toggle", "POST"),
        ("GET", "/on", "POST"),
        ("PUT", "/off", "POST"),
        ("POST", "/", "GET, HEAD"),
        ("POST", "/status", "GET, HEAD"),
        ("DELETE", "/report", "GET, HEAD"),
        ("HEAD", "/toggle", "POST"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("BREW", "/toggle", "POST"),
        ("toggle", "/toggle", "POST"),
    ]:
        response, body = ask(address, method, path)
        assert (response.status, response.getheader("Allow")) == (405, allowed)
        assert (body == "") == (method == "HEAD")
    assert state.wanted() is False


def test_head_is_answered_wherever_get_is_and_never_toggles(start, compared):
    state, address = start(allow_get_toggle=True)
    state.applied(False, compared(make_report()))
    for path in ("/status", "/report", "/metrics", "/healthz", "/ui", "/ui/app.js", "/ui/data"):
        full, body = ask(address, "GET", path)
        head, nothing = ask(address, "HEAD", path)
        assert (full.status, head.status, nothing) == (200, 200, "")
        assert head.getheader("Content-Type") == full.getheader("Content-Type")
        if path not in ("/ui/data", "/metrics"):  # with times
            assert int(head.getheader("Content-Length")) == len(body.encode())
    assert ask(address, "HEAD", "/")[0].getheader("Content-Type") == "application/json"
    assert state.wanted() is False


def test_answers_to_wrong_tokens_come_one_by_one_and_delay_nobody_else(monkeypatch):
    monkeypatch.setattr(http_module, "_WRONG_TOKEN_S", 0.2)
    state = ControllerState(rank=0, world_size=2, enabled=False)
    controller = StragglerController(
        state, bind="127.0.0.1", port=0, token="s3cret", allow_get_toggle=False
    )
    statuses = []

    def guess(number):
        headers = {"Authorization": f"Bearer {number}"}
        statuses.append(ask(controller.address, "GET", "/status", headers)[0].status)

    threads = [threading.Thread(target=guess, args=(number,)) for number in range(4)]
    with controller._server._refusing:
        for thread in threads:
            thread.start()
        right = {"Authorization": "Bearer s3cret"}
        assert ask(controller.address, "GET", "/status", right)[0].status == 200
        assert statuses == []
        began = time.monotonic()
    for thread in threads:
        thread.join()
    assert statuses == [401] * 4
    assert time.monotonic() - began >= 4 * 0.2
    controller.close()


@pytest.mark.parametrize("token", ["s3cret", "with space", "x" * 200])
def test_a_token_guards_everything_but_healthz(start, token, monkeypatch):
    monkeypatch.setattr(http_module, "_WRONG_TOKEN_S", 0.0)
    state, address = start(token=token)
    right = {"Authorization": f"Bearer {token}"}
    wrong = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": token},
        {"Authorization": f"Basic {token}"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Bearer {token[:-1]}"},
        {"Authorization": f"Bearer {token.upper()}X"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"X-Authorization": f"Bearer {token}"},
    ]
    for headers in wrong:
        for method, path in [
            ("POST", "/on"),
            ("GET", "/status"),
            ("GET", "/x"),
            ("POST", "/healthz"),
        ]:
            response, body = ask(address, method, path, headers)
            assert (response.status, response.getheader("WWW-Authenticate")) == (401, "Bearer")
            assert token not in body
        assert ask(address, "GET", "/healthz", headers)[0].status == 200
    twice = f"POST /on HTTP/1.0\r\nAuthorization: Bearer {token}\r\nAuthorization: Bearer x\r\n\r\n"
    assert status_code(ask_raw(address, twice.encode())) == 401
    assert state.wanted() is False
    assert ask(address, "GET", "/status", right)[0].status == 200
    assert ask(address, "POST", "/on", {"authorization": f"bearer  {token}"})[0].status == 202
    assert state.wanted() is True


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_web_pages_are_refused(start, headers):
    state, address = start(token="s3cret", allow_get_toggle=True)
    for method, path in [("POST", "/on"), ("GET", "/"), ("GET", "/healthz"), ("OPTIONS", "/on")]:
        response, _ = ask(address, method, path, {**headers, "Authorization": "Bearer s3cret"})
        assert response.status == 403
        assert response.getheader("Access-Control-Allow-Origin") is None
    assert state.wanted() is False
    ordinary = {"Sec-Fetch-Site": "none", "Authorization": "Bearer s3cret"}
    assert ask(address, "GET", "/status", ordinary)[0].status == 200


MALFORMED = {
    "one word": (b"GARBAGE\r\n\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "no version, changes": (b"POST /on\r\n\r\n", 400),
    "bad version": (b"POST /on HTTQ/1.0\r\n\r\n", 400),
    "HTTP/2": (b"POST /on HTTP/2.0\r\n\r\n", 505),
    "four words": (b"POST /on x HTTP/1.0\r\n\r\n", 400),
    "blank line": (b"\r\n\r\n", None),
    "binary": (bytes(range(256)) + b"\r\n\r\n", 400),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400),
    "long line": (b"GET /" + b"a" * 9000 + b" HTTP/1.0\r\n\r\n", 414),
    "long line without end": (b"A" * 20_000, 414),
    "long header": (b"POST /on HTTP/1.0\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
    "long headers": (b"POST /on HTTP/1.0\r\n" + b"X: aaaaaaaaaa\r\n" * 900 + b"\r\n", 431),
    "many headers": (b"POST /on HTTP/1.0\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
    "long body": (b"POST /on HTTP/1.0\r\nContent-Length: 8193\r\n\r\n" + b"a" * 8193, 413),
    "huge body": (b"POST /on HTTP/1.0\r\nContent-Length: " + b"9" * 4000 + b"\r\n\r\n", 413),
    "bad length": (b"POST /on HTTP/1.0\r\nContent-Length: ten\r\n\r\n", 400),
    "negative length": (b"POST /on HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 400),
    "two lengths": (
        b"POST /on HTTP/1.0\r\nContent-Length: 0\r\nContent-Length: 1\r\n\r\na",
        400,
    ),
    "chunked": (b"POST /on HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    "CR in a header": (b"POST /on HTTP/1.0\r\nX: a\rHost: b\r\n\r\n", 400),
    "CR in the request line": (b"POST /on\r HTTP/1.0\r\nX: a\r\n\r\n", 400),
    "CR before the end": (b"POST /on HTTP/1.0\r\nX: a\r\r\n\r\n", 400),
    "injection": (b"GET /\x0d\x0aSet-Cookie:x HTTP/1.0\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused_and_change_nothing(start, name):
    data, expected = MALFORMED[name]
    state, address = start()
    answer = ask_raw(address, data)
    assert status_code(answer) == expected
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        assert int(fields[b"Content-Length"]) == len(body)
        assert json.loads(body)["error"]
        assert b"aaaa" not in answer
    assert state.wanted() is False
    assert ask(address, "GET", "/healthz")[1] == "ok"


def test_limits_leave_room_for_ordinary_requests(start):
    state, address = start()
    response, _ = ask(address, "POST", "/on", {"X": "a" * 7000}, body=b"a" * 8192)
    assert (response.status, state.wanted()) == (202, True)
    assert ask(address, "GET", "/status?" + "a" * 7000)[0].status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /on",
        b"POST /on HTTP/1.0\r\n",
        b"POST /on HTTP/1.0\r\nX: 1\r\n",
        b"POST /on HTTP/1.0\r\nContent-Length: 5\r\n\r\nabc",
    ],
)
def test_a_client_that_hangs_up_early_changes_nothing(start, sent):
    state, address = start()
    with socket.create_connection(address, timeout=WAIT_S) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert state.wanted() is False


def test_silent_clients_do_not_delay_others(start, monkeypatch):
    monkeypatch.setattr(ControllerRequest, "timeout", 3600)
    _, address = start()
    silent = [socket.create_connection(address, timeout=20) for _ in range(8)]
    try:
        assert ask(address, "GET", "/healthz")[1] == "ok"
    finally:
        for client in silent:
            client.close()


class SilentRouter:
    """Answers nothing: its clients are to be cut off before they have asked."""


@pytest.fixture
def small_server():
    server = ControllerServer(
        socket.AF_INET, ("127.0.0.1", 0), SilentRouter(), max_connections=3, request_deadline_s=0.6
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.cut_all(10)
    server.server_close()


def drip(client, most):
    """Send byte after byte; return how many went out before the connection was cut."""
    for sent in range(most):
        try:
            client.send(b"a")
        except OSError:
            return sent
        time.sleep(0.02)
    return most


def test_a_client_that_sends_byte_by_byte_is_cut_off(small_server):
    began = time.monotonic()
    with socket.create_connection(small_server.server_address, timeout=WAIT_S) as client:
        sent = drip(client, 1000)
    assert 1 <= sent < 1000
    assert time.monotonic() - began >= 0.6


def test_connections_over_the_bound_get_503_at_once_and_places_come_back(small_server):
    address = small_server.server_address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_server, "_request_deadline_s", 3600.0)
        patch.setattr("mcore.observe.straggler.server.http._PATIENCE_S", 3600.0)
        patch.setattr(ControllerRequest, "timeout", 3600)
        held = [socket.create_connection(address, timeout=WAIT_S) for _ in range(3)]
        surplus = ask_raw(address, b"")
        assert surplus.startswith(b"HTTP/1.0 503 ")
        held.pop().close()
        deadline = time.monotonic() + WAIT_S
        while (answer := ask_raw(address, b"GARBAGE\r\n\r\n")).startswith(b"HTTP/1.0 503 "):
            assert time.monotonic() < deadline
        assert status_code(answer) == 400
        for client in held:
            client.close()


def test_silent_clients_give_up_their_places_to_one_that_asks(small_server):
    """However long they may stay: whoever tries again gets in."""
    address = small_server.server_address
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_server, "_request_deadline_s", 3600.0)
        patch.setattr("mcore.observe.straggler.server.http._PATIENCE_S", 0.0)
        patch.setattr(ControllerRequest, "timeout", 3600)
        held = [socket.create_connection(address, timeout=20) for _ in range(3)]
        for _ in range(5):
            held.append(socket.create_connection(address, timeout=20))
            assert status_code(ask_raw(address, b"GARBAGE\r\n\r\n")) == 400
        for client in held:
            client.close()


class CountingReport(SimpleNamespace):
    """A report that counts how often it is rendered."""

    rendered = 0

    def to_prometheus(self, *, all_ranks=True):
        self.rendered += 1
        return self.report.to_prometheus(all_ranks=all_ranks)


def test_a_report_is_rendered_once_however_many_ask(start, compared):
    state, address = start()
    report = CountingReport(report=make_report())
    state.applied(True, compared(report, 1.0))
    bodies = {ask(address, "GET", "/metrics")[1] for _ in range(5)}
    assert len(bodies) == 1
    assert report.rendered == 1
    ask(address, "GET", "/metrics?ranks=all")
    assert report.rendered == 2
    state.applied(True, compared(CountingReport(report=report.report), 2.0))
    response, body = ask(address, "GET", "/metrics")
    assert "mcore_straggler_last_report_timestamp_seconds 2" in body
    assert response.getheader("Content-Encoding") is None
    assert report.rendered == 2


def get_packed(address, path, encodings):
    connection = http.client.HTTPConnection(*address, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers={"Accept-Encoding": encodings})
        response = connection.getresponse()
        return response.getheader("Content-Encoding"), response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/metrics", "/report", "/metrics?ranks=all"])
def test_packed_answers_are_the_plain_ones(start, compared, path):
    state, address = start()
    state.applied(True, compared(make_report()))
    _, plain = ask(address, "GET", path)
    encoding, packed = get_packed(address, path, "br, GZIP;q=0.5")
    assert encoding == "gzip"
    assert gzip.decompress(packed).decode() == plain
    for refused in ("", "identity", "gzip;q=0", "br"):
        assert get_packed(address, path, refused) == (None, plain.encode())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("evil.example:80", 403), ("127.0.0.1.evil.example", 403),
     ("localhost:9", 200), ("LOCALHOST", 200), ("127.0.0.1:65535", 200), ("[::1]:80", 403),
     ("10.0.0.3", 403), ("", 403), ("0.0.0.0:9", 403), ("[::ffff:127.0.0.1]:9", 403)],
)  # fmt: skip
def test_without_a_token_only_the_address_that_listens_is_answered(start, method, host, status):
    """Pages of others ask under their name, or under an address that leads to this machine too."""
    state, address = start()
    path = "/status" if method == "GET" else "/on"
    response, _ = ask(address, method, path, {"Host": host})
    assert response.status == (202 if (method, status) == ("POST", 200) else status)
    assert state.wanted() is (response.status == 202)


def test_a_request_with_two_hosts_is_refused_whichever_comes_first(start):
    state, address = start()
    for first, second in (("localhost", "evil.example"), ("evil.example", "localhost")):
        head = f"POST /on HTTP/1.1\r\nHost: {first}\r\nHost: {second}\r\n\r\n"
        assert ask_raw(address, head.encode()).startswith(b"HTTP/1.0 400 ")
    assert not state.wanted()


def test_with_a_token_any_name_will_do_and_wrong_tokens_are_counted(start):
    _, address = start(token="secret")
    named = {"Host": "node7.cluster", "Authorization": "Bearer secret"}
    ask(address, "GET", "/status", {**named, "Authorization": "Bearer wrong"})
    response, body = ask(address, "GET", "/metrics", named)
    assert response.status == 200
    assert "mcore_straggler_refused_total 1" in body


def test_nothing_is_printed_and_the_token_is_not_logged(start, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    _, address = start(token="s3cret-t0ken")
    for headers in ({}, {"Authorization": "Bearer s3cret-t0ken"}, {"Authorization": "Bearer no"}):
        for method in ("GET", "POST"):
            ask(address, method, "/toggle", headers)
    ask_raw(address, b"GARBAGE s3cret-t0ken\r\n\r\n")
    with socket.create_connection(address) as client:
        client.sendall(b"POST /on HTTP/1.0\r\nAuthorization: Bearer s3cret-t0ken\r\nConten")
    assert capfd.readouterr() == ("", "")
    assert "s3cret" not in caplog.text
    ours = [record for record in caplog.records if record.name.startswith("mcore.observe.stragg")]
    assert all(record.levelno <= logging.DEBUG for record in ours)


def test_a_failing_handler_does_not_end_the_server(start, capfd):
    class BrokenState(ControllerState):
        def status(self):
            raise RuntimeError("broken")

    _, address = start(BrokenState(rank=0, world_size=1, enabled=False))
    with pytest.raises(http.client.HTTPException):
        ask(address, "GET", "/status")
    assert ask(address, "GET", "/healthz")[1] == "ok"
    assert capfd.readouterr() == ("", "")


def test_answers_have_valid_headers(start):
    _, address = start()
    answer = ask_raw(address, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    head, body = answer.split(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    assert (first, body) == (b"HTTP/1.0 200 OK", b"ok")
    for field in fields:
        assert re.fullmatch(rb"[A-Za-z-]+: [ -~]+", field)
    assert b"Python" not in answer


def new_threads(before):
    """Those of controllers; what other tests have left behind may come and go."""
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("straggler")
    ]


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_close_ends_threads_and_frees_the_port(monkeypatch):
    monkeypatch.setattr(ControllerRequest, "timeout", 3600)  # nobody waits for a silent client
    before, port = set(threading.enumerate()), free_port()
    state = ControllerState(rank=0, world_size=1, enabled=False)
    settings = {"bind": "127.0.0.1", "token": None, "allow_get_toggle": False}
    controller = StragglerController(state, port=port, **settings)
    (thread,) = new_threads(before)
    assert (thread.name, thread.daemon) == ("straggler", True)
    ask(controller.address, "GET", "/")
    wait_for(lambda: new_threads(before) == [thread])
    silent = socket.create_connection(controller.address, timeout=WAIT_S)
    wait_for(lambda: len(new_threads(before)) == 2)  # it has been accepted
    controller.close()
    assert silent.recv(1) == b""
    controller.close()
    wait_for(lambda: not new_threads(before))
    silent.close()
    again = StragglerController(state, port=port, **settings)
    assert again.address == ("127.0.0.1", port)
    again.close()


def test_a_client_that_reads_its_answer_leaves_the_port_free(monkeypatch):
    monkeypatch.setattr(
        "mcore.observe.straggler.server.http._GOODBYE_S", WAIT_S
    )  # for a slow machine
    state = ControllerState(rank=0, world_size=1, enabled=False)
    controller = StragglerController(
        state, bind="127.0.0.1", port=free_port(), token=None, allow_get_toggle=False
    )
    for _ in range(5):
        assert ask(controller.address, "GET", "/healthz")[1] == "ok"
    controller.close()
    with socket.socket() as plain:  # without SO_REUSEADDR
        plain.bind(controller.address)


def test_a_port_in_use(start):
    before = set(threading.enumerate())
    _, (_, port) = start()
    with pytest.raises(OSError, match="in use"):
        start(port=port)
    assert [thread.name for thread in new_threads(before)] == ["straggler"]


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_that_is_none(start, port):
    with pytest.raises(ValueError, match=r"expected 0\.\.65535"):
        start(port=port)


def has_ipv6_loopback():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_ipv6_loopback(start):
    state, address = start(bind="::1")
    assert address[0] == "::1"
    assert ask(address, "POST", "/on")[1] == ON
    assert state.wanted() is True


def test_a_host_name(start):
    _, address = start(bind="localhost")
    assert address[0] in ("127.0.0.1", "::1")
    assert ask(address, "GET", "/healthz")[1] == "ok"


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(bind):
    check_binding(bind, None)
    check_binding(bind, "token")


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "", "10.1.2.3", "192.0.2.1", "fe80::1"])
def test_other_addresses_need_a_token(bind, start):
    with pytest.raises(ValueError, match="without a token"):
        check_binding(bind, None)
    with pytest.raises(ValueError, match="without a token"):
        start(bind=bind)
    with pytest.raises(ValueError, match=r"15 characters.*give 16"):
        check_binding(bind, "x" * 15)
    check_binding(bind, "x" * 16)


@pytest.mark.parametrize("bind", ["999.1.1.1", "a" * 300, "127.0.0.1:80"])
def test_an_address_that_is_none(bind):
    with pytest.raises(ValueError, match="cannot listen on"):
        check_binding(bind, "token")


@pytest.mark.parametrize("token", ["", " ", "line\n", "snow\u2603man", " padded", "a\tb"])
def test_a_token_that_no_header_can_carry(token):
    with pytest.raises(ValueError, match="token") as caught:
        check_binding("127.0.0.1", token)
    assert token.strip() == "" or token.strip() not in str(caught.value)


def test_all_addresses_with_a_token(start):
    token = "0123456789abcdef"
    state, (_, port) = start(bind="0.0.0.0", token=token)
    right = {"Authorization": f"Bearer {token}"}
    assert ask(("127.0.0.1", port), "POST", "/on")[0].status == 401
    assert ask(("127.0.0.1", port), "POST", "/on", right)[0].status == 202
    assert state.wanted() is True


def test_a_forked_child_can_close_its_copy(start):
    state = ControllerState(rank=0, world_size=1, enabled=False)
    controller = StragglerController(
        state, bind="127.0.0.1", port=0, token=None, allow_get_toggle=False
    )
    child = os.fork()
    if child == 0:
        controller.close()
        os._exit(0)
    deadline = time.monotonic() + WAIT_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert ask(controller.address, "GET", "/healthz")[1] == "ok"
    controller.close()


def test_a_process_ends_with_its_controller_running():
    code = (
        "from mcore.observe.straggler.server.controller import StragglerController\n"
        "from mcore.observe.straggler.server.routes import ControllerState\n"
        "import socket\n"
        "state = ControllerState(rank=0, world_size=1, enabled=False)\n"
        "controller = StragglerController(\n"
        "    state, bind='127.0.0.1', port=0, token=None, allow_get_toggle=False)\n"
        "silent = socket.create_connection(controller.address)\n"
        "print('end')\n"
    )
    done = run_script(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_requests_from_many_threads_at_once(start):
    state, address = start()
    threads = [
        threading.Thread(target=lambda: [ask(address, "POST", "/toggle") for _ in range(5)])
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state.wanted() is False  # 30 toggles cancel out
