"""``mcore-straggler`` against real controllers on the loopback device."""

import contextlib
import fcntl
import gzip
import http.server
import io
import json
import math
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mcore.observe import Outlier, SectionStats, StragglerReport
from mcore.observe.straggler.server.controller import StragglerController
from mcore.observe.straggler.server.routes import ControllerState
from mcore.observe.straggler_command.__main__ import main
from mcore.observe.straggler_command.client import Address, AnswerError, Client, read_token
from mcore.observe.straggler_command.snapshot import NUM_KEPT, JobSnapshot, refresh
from mcore.observe.straggler_command.table import Poller, format_text, text_of, verdict
from rank_testing import free_port

COMMAND = [sys.executable, "-m", "mcore.observe.straggler_command"]
PATIENTLY = ("--timeout", "120")  # an answer comes at once on a machine that has time


def report_of(times, *, slow=(), hosts=None, unix_time=1000.0, sensors=(), ranks=(), devices=()):
    nan = (math.nan,) * len(times)
    columns = dict.fromkeys(("data_ms", "temp_c", "power_w", "util_pct", "clock_mhz"), nan)
    stats = [SectionStats(4, 4 * value, value, value) for value in times]
    hosts = hosts or tuple(f"node{at}" for at in range(len(times)))
    of = devices or [""] * len(times)
    named = tuple(
        Outlier("forward", at, hosts[at], times[at], 10.0, 9.0, 0.2, of[at]) for at in slow
    )
    return StragglerReport(
        unix_time=unix_time,
        world_size=len(times),
        log_interval=4,
        total_flops=1e12,
        hosts=hosts,
        metrics={"elapsed_ms": tuple(times)} | columns | {"etpt_tf": nan} | dict(sensors),
        sections={"compute": tuple(stats), "forward": tuple(reversed(stats))},
        relative_scores={},
        individual_scores={},
        outliers=(),
        stragglers=named,
        ranks=ranks,
        devices=devices,
    )


def client_of(address, timeout_s=120.0):
    return Client(Address.parse(address), token=None, timeout_s=timeout_s)


def run(*words):
    return main([*words, *PATIENTLY])


def poller_of(job):
    poller = Poller([client_of(job.address)], "elapsed_ms", 1.0)
    poller.poll_once()
    return poller


def publish(state, report):
    found = SimpleNamespace(
        unix_time=report.unix_time,
        report=report,
        by_rank=lambda: torch.zeros(7, report.world_size),
        places=[(host, "cpu") for host in report.hosts],
        section_names=(),
        stragglers=(),
        is_measuring=False,
    )
    state.applied(True, found)


@pytest.fixture
def start():
    with contextlib.ExitStack() as ends:

        def starter(*reports, token=None, port=0):
            state = ControllerState(rank=0, world_size=4, enabled=True)
            for report in reports:
                publish(state, report)
            controller = StragglerController(
                state, bind="127.0.0.1", port=port, token=token, allow_get_toggle=False
            )
            ends.callback(controller.close)
            return SimpleNamespace(
                state=state,
                address="{}:{}".format(*controller.address),
                close=controller.close,
                port=controller.address[1],
            )

        yield starter


@pytest.fixture
def nobody():
    """An address where nobody listens: taken, so that nobody else does meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_once_as_json_names_the_slow_and_says_so_with_its_exit_code(start, nobody, capsys):
    sensors = {"temp_c": (50.0, 60.0, 70.0, math.nan), "power_w": (300.0,) * 4}
    devices = tuple(f"cuda:{at}" for at in range(4))
    job = start(report_of((10.0, 40.0, 12.0, 11.0), slow=[1], sensors=sensors, devices=devices))
    calm = start(report_of((10.0, 10.0)))
    assert run("watch", "--once", "--json", "--rows", "2", job.address, calm.address) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["slow"], said["unreachable"]) == (True, 0)
    first, second = said["controllers"]
    assert (first["address"], first["enabled"], first["reports"]) == (job.address, True, 1)
    assert first["report_age_s"] == pytest.approx(time.time() - 1000, abs=60)
    assert first["slow"] == [
        {"rank": 1, "host": "node1", "device": "cuda:1", "metric": "forward", "value": 40.0}
        | {"times_median": 40 / 11, "score": 0.2}
    ]
    assert [
        (row["rank"], row["host"], row["device"], row["value"], row["slow_in"])
        for row in first["slowest"]
    ] == [(1, "node1", "cuda:1", 40.0, ["forward"]), (2, "node2", "cuda:2", 12.0, [])]
    assert first["slowest"][0]["times_median"] == pytest.approx(40 / 11)
    assert (first["slowest"][0]["temp_c"], first["slowest"][0]["power_w"]) == (60.0, 300.0)
    assert second["slow"] == []
    assert run("watch", "--once", "--json", calm.address) == 0
    assert run("watch", "--once", "--json", calm.address, nobody) == 1
    assert run("watch", "--once", job.address, nobody) == 3  # known is known
    assert run("watch", "--once", "--json", start().address) == 0
    assert '"last_report_unix": null' in capsys.readouterr().out.splitlines()[-1]


def test_a_young_job_is_measuring_and_not_called_healthy(start, capsys):
    young = start(replace(report_of((10.0, 40.0)), measuring=True))
    calm = start(report_of((10.0, 10.0)))
    assert run("watch", "--once", young.address, calm.address) == 0
    shown = capsys.readouterr().out
    assert "measuring: too few reports" in shown
    assert shown.count("no rank is slow") == 1


def test_a_table_has_the_slow_first_then_the_slowest(start, capsys):
    times = [10.0 + at / 100 for at in range(4096)]
    hosts = tuple("node-with-a-name-that-is-long" if at == 7 else "n" for at in range(4096))
    devices = tuple(f"cuda:{at % 8}" for at in range(4096))
    sensors = {"temp_c": (61.0,) * 4096}
    job = start(report_of(times, slow=[7], hosts=hosts, sensors=sensors, devices=devices))
    assert run("watch", "--once", "--rows", "3", job.address) == 3
    head, verdict, titles, *rows, more = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{job.address}  on  4 ranks  report 1, \d+ d ago", head)
    slow = "SLOW: rank 7 on node-with-a-name-that-is-long, cuda:7 (forward 0.33 x"
    assert verdict.startswith(slow)
    assert " ".join(titles.split()) == "rank host step ms x median device slow in recent"
    assert [row.split()[0] for row in rows] == ["7", "4095", "4094"]
    assert rows[0].split() == [
        "7",
        "node-with-a-name-that-..",
        "10.07",
        "0.33",
        "cuda:7",
        "61C",
        "forward",
        "▁",
    ]
    assert more == "(4093 more ranks)"
    for metric, first in (("forward", "0"), ("etpt_tf", "7"), ("temp_c", "7")):
        assert run("watch", "--once", "--metric", metric, "--rows", "2", job.address) == 3
        rows = capsys.readouterr().out.splitlines()[3:5]
        assert rows[0].split()[0] == "7"
        assert rows[1].split()[0] == ("0" if metric != "forward" else first)


def test_a_metric_that_no_job_has_is_wrong_usage_and_hides_no_slow_rank(start, capsys):
    job, other = start(report_of((10.0, 30.0), slow=[1])), start(report_of((5.0, 6.0)))
    for words in (["--once"], ["--once", "--json"], []):
        assert run("watch", *words, "--metric", "nonsense", job.address, other.address) == 2
        error = capsys.readouterr().err
        assert "no controller has the metric 'nonsense': they have elapsed_ms, data_ms" in error
    lacks = report_of((7.0, 8.0), slow=[0])
    lacks.sections.pop("forward")
    third = start(lacks)
    words = ["--once", "--metric", "forward", third.address, other.address]
    assert run("watch", *words) == 3
    out = capsys.readouterr().out
    assert "SLOW: rank 0 on node0 (forward)" in out
    rows = [line.split() for line in out.splitlines() if "node" in line and "SLOW" not in line]
    assert [row[:3] for row in rows] == [
        ["0", "node0", "-"], ["1", "node1", "-"], ["0", "node0", "6"], ["1", "node1", "5"],
    ]  # fmt: skip


def test_a_verdict_names_each_slow_rank_once_with_all_that_it_is_slow_in(start):
    report = report_of((40.0, 10.0, 11.0, 50.0, 10.0, 60.0, 70.0, 10.0), slow=[3, 0, 5, 6])
    both = [one for one in report.stragglers for one in (one, replace(one, metric="elapsed_ms"))]
    job = start(replace(report, stragglers=tuple(both)))
    assert verdict(poller_of(job).jobs[0]) == (
        "SLOW: rank 3 on node3 (forward 4.55 x the median, elapsed_ms 4.55 x the median), "
        "rank 0 on node0 (forward 3.64 x the median, elapsed_ms 3.64 x the median), "
        "rank 5 on node5 (forward 5.45 x the median, elapsed_ms 5.45 x the median) and 1 more"
    )


def test_low_clocks_and_throughputs_are_the_bad_ones(start):
    job = start(report_of((1.0, 1.0), sensors={"clock_mhz": (1980.0, 900.0)}))
    snapshot = refresh(client_of(job.address), JobSnapshot("", "clock_mhz"))
    assert [row["rank"] for row in snapshot.rows(5)] == [1, 0]


def test_history_is_of_the_reports_seen_and_starts_again_with_the_job(start):
    job = start(report_of((10.0, 11.0)), port=free_port())
    client = client_of(job.address)
    snapshot = refresh(client, JobSnapshot("", "elapsed_ms"))
    for at in range(1, NUM_KEPT + 5):
        publish(job.state, report_of((10.0, 11.0 + at), unix_time=1000.0 + at))
        snapshot = refresh(client, refresh(client, snapshot))  # two requests, one report
    recent = snapshot.rows(1)[0]["recent"]
    assert recent == tuple(11.0 + at for at in range(5, NUM_KEPT + 5))
    job.close()
    gone = refresh(client, snapshot)
    assert "refused" in gone.error
    assert (gone.rows(1), gone.slow) == (snapshot.rows(1), ())
    again = start(report_of((20.0, 30.0), unix_time=2000.0), port=job.port)
    assert refresh(client, gone).rows(1)[0]["recent"] == (30.0,)
    publish(again.state, report_of((20.0, 30.0, 40.0), unix_time=2001.0))  # other ranks
    assert refresh(client, refresh(client, gone)).rows(1)[0]["recent"] == (40.0,)


def test_switching_and_asking_need_the_token_and_take_it_from_a_file_or_the_environment(
    start, tmp_path, monkeypatch, capsys
):
    job = start(report_of((1.0, 2.0)), token="s3cret")
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    monkeypatch.delenv("MCORE_STRAGGLER_TOKEN", raising=False)
    assert run("off", job.address) == 1
    out, err = capsys.readouterr()
    assert (out, job.state.wanted()) == ("", True)
    assert "401: send the header Authorization" in err
    assert "MCORE_STRAGGLER_TOKEN or --token-file" in err
    for command, wanted in (("off", False), ("toggle", True), ("toggle", False), ("on", True)):
        assert run(command, job.address, "--token-file", str(file)) == 0
        assert job.state.wanted() is wanted
        word = "ON" if wanted else "OFF"
        assert f"Will turn StragglerDetector {word}" in capsys.readouterr().out
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "s3cret")
    assert run("toggle", job.address) == 0
    assert run("status", job.address) == 0
    assert f"{job.address}  on (off after a report)  4 ranks" in capsys.readouterr().out
    assert run("status", "--json", job.address, job.address) == 0
    assert [json.loads(line)["pending"] for line in capsys.readouterr().out.splitlines()] == [
        False,
        False,
    ]
    assert run("report", job.address) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["elapsed_ms"] == [1.0, 2.0]
    assert run("report", start(token="s3cret").address) == 1
    assert "404: no report yet" in capsys.readouterr().err
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "another")
    assert run("watch", "--once", job.address) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["watch"],
        ["watch", "localhost"],
        ["watch", "user@host:80"],
        ["watch", "host:99999"],
        ["watch", "https://host:80"],
        ["watch", "h:80", "--json"],
        ["watch", "h:80", "--interval", "0"],
        ["watch", "h:80", "--rows", "x"],
        ["status", "h:80", "--token-file", "/nowhere"],
        ["status", "h:80", "--token-file", "{empty}"],
        ["toggle", "h:80", "--token", "on-the-command-line"],
    ],
)
def test_wrong_usage(words, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    try:
        code = main([word.format(empty=tmp_path / "empty") for word in words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "mcore-straggler" in capsys.readouterr().err


def test_addresses_and_tokens(monkeypatch):
    for text, shown in (("n1:80", "n1:80"), ("[::1]:9", "[::1]:9"), ("http://n1:80/", "n1:80")):
        assert str(Address.parse(text)) == shown
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "")
    assert read_token(None) is None
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "a\r\nX: y")
    with pytest.raises(ValueError, match="MCORE_STRAGGLER_TOKEN must be printable"):
        read_token(None)


class Stranger(http.server.BaseHTTPRequestHandler):
    """What else may answer at an address."""

    def do_GET(self):
        body, headers, status = self.server.says
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            if body is None:
                while not self.server.ends.wait(0.05):
                    self.wfile.write(b" ")
            else:
                self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stranger():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    server.daemon_threads = True
    server.ends = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.ends.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_other_servers_are_errors_that_say_what_came(stranger, capsys):
    address = f"127.0.0.1:{stranger.server_address[1]}"

    def error_of(body, headers=None, status=200, timeout_s=120.0):
        stranger.says = body, headers or {}, status
        return refresh(client_of(address, timeout_s), JobSnapshot(address, "elapsed_ms")).error

    assert "not a straggler controller: it answers '<html> [31mhi'" in error_of(b"<html>\x1b[31mhi")
    assert "not a straggler controller" in error_of(b"[1, 2]")
    assert "not a straggler controller" in error_of(b"[" * 100_000)
    assert "not a straggler controller" in error_of(b'{"reports": 1}')
    status = b'{"reports": 1, "world_size": 2, "metrics": {}}'
    assert "not a report of a straggler controller (KeyError: 'ranks')" in error_of(status)
    assert "its gzip is damaged" in error_of(b"no gzip", {"Content-Encoding": "gzip"})
    assert "Incomplete" in error_of(b"{}", {"Content-Length": "9"})
    assert error_of(b"", status=302, headers={"Location": "http://x/"}) == "it answers 302: no text"
    assert error_of(None, timeout_s=1.0) == "no answer within 1 s"  # a byte now and then
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = ["watch", "--once", "--timeout", "0.3"]
        assert main([*words, f"127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert "NO ANSWER: no answer within 0.3 s" in capsys.readouterr().out
    with pytest.raises(AnswerError, match="unknown host name"):
        Client(Address("no.such.invalid", 80), token=None, timeout_s=30).request("GET", "/")


def test_a_report_of_many_members_of_gzip_and_an_endless_one(stranger, monkeypatch):
    client = client_of(f"127.0.0.1:{stranger.server_address[1]}")
    packed = gzip.compress(b'{"a"') + gzip.compress(b": 1}")
    stranger.says = packed, {"Content-Encoding": "gzip"}, 200
    assert client.request("GET", "/").json() == {"a": 1}
    monkeypatch.setattr("mcore.observe.straggler_command.client._MOST_BYTES", 100_000)
    stranger.says = gzip.compress(bytes(10_000_000)), {"Content-Encoding": "gzip"}, 200
    with pytest.raises(AnswerError, match="over 100000 bytes"):
        client.request("GET", "/")


def test_texts_of_a_report_cannot_drive_the_terminal(start, capsys):
    hosts = ("evil\x1b]0;title\x07\x9b2J", "[red]x[/red]\u202e")
    job = start(report_of((10.0, 90.0), slow=[0, 1], hosts=hosts))
    assert run("watch", "--once", job.address) == 3
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)
    assert "[red]x[/red]" in out


@pytest.mark.parametrize("width", [10, 20, 40, 80])
def test_no_line_is_wider_than_the_terminal(start, width):
    times = tuple(10.0 + at for at in range(40))
    job = start(report_of(times, slow=[3], sensors={"temp_c": (61.0,) * 40}))
    poller = Poller([client_of(job.address)], "elapsed_ms", 1)
    poller.poll_once()
    shown = format_text(poller.jobs, 5, width).splitlines()
    assert max(map(len, shown)) <= width
    assert len(shown) >= 7
    assert "3" in shown[3].split()[0]
    assert ("recent" in shown[2]) == (width >= 80)


def test_ascii_for_terminals_without_bars(start):
    job = start(report_of((10.0, 20.0)))
    publish(job.state, report_of((12.0, 30.0), unix_time=1001.0))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    poller = Poller([client_of(job.address)], "elapsed_ms", 1)
    poller.poll_once()
    assert text_of(poller.jobs, 1, out).isascii()


def on_a_terminal(words, *, env=None, size=(30, 100), until, then=()):
    """Run the command on a terminal, press Ctrl-C when a text is there; all it wrote, and code."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which jobs in a shell's background ignore

    chosen = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [*COMMAND, *words, *PATIENTLY], stdin=child, stdout=child, stderr=child, close_fds=True,
        preexec_fn=take_terminal,
        env=chosen | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""} | (env or {}),
    )  # fmt: skip
    os.close(child)
    written, wanted, deadline = "", [until, *(text for text, _ in then)], time.monotonic() + 400
    actions = [action for _, action in then]
    mark = 0
    try:
        while time.monotonic() < deadline:
            if select.select([parent], [], [], 0.2)[0]:
                try:
                    written += os.read(parent, 65536).decode("utf-8", "replace")
                except OSError:
                    break
            if wanted and (found := re.search(wanted[0], written[mark:])):
                mark += found.end()
                wanted.pop(0)
                if actions:
                    actions.pop(0)()
                elif not wanted:
                    os.write(parent, b"\x03")
        assert not wanted, written[-2000:]
        return written, process.wait(120)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_live_on_a_terminal_through_the_end_of_a_job_and_its_next_start(start):
    job = start(report_of((10.0, 40.0), slow=[1]), port=free_port())
    next_report = report_of((1.0, 1.0), unix_time=2000.0)
    steps = [
        ("refused", job.close),
        ("no rank is slow", lambda: start(next_report, port=job.port)),
    ]
    words = ["watch", job.address, "--interval", "0.1"]
    written, code = on_a_terminal(words, until="rank 1 on node1", then=steps)
    assert code == 0  # of the last look
    assert "\x1b[?1049h" in written  # the other screen, and back
    assert "\x1b[?1049l" in written
    assert "\x1b[31m" in written
    assert "Traceback" not in written


def test_without_colour_and_on_a_dumb_terminal(start):
    job = start(report_of((10.0, 40.0), slow=[1]))
    words = ["watch", job.address, "--interval", "0.1"]
    written, code = on_a_terminal(words, env={"NO_COLOR": "1"}, until="40.*4.00")
    assert (code, re.findall(r"\x1b\[[0-9;]*3[0-9]m", written)) == (3, [])
    written, code = on_a_terminal(words, env={"TERM": "dumb"}, until="40.*4.00", size=(30, 60))
    assert (code, "\x1b" in written) == (3, False)


def test_without_rich_only_the_table_is_missing(start, hide_libraries, capsys):
    job = start(report_of((10.0, 40.0), slow=[1]))
    hide_libraries()
    assert run("watch", "--once", job.address) == 2
    assert 'pip install "mcore-observe[watch]"' in capsys.readouterr().err
    assert run("watch", "--once", "--json", job.address) == 3
    assert run("status", job.address) == 0


@pytest.mark.parametrize("arguments", [["--help"], ["status", "127.0.0.1:1"]])
def test_the_installed_command_runs_without_torch(arguments):
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "[command] = entry_points(group='console_scripts', name='mcore-straggler')\n"
        "try:\n"
        "    command.load()(sys.argv[1:])\n"
        "finally:\n"
        "    print(sorted({'torch', 'numpy'} & sys.modules.keys()), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout
    assert done.stderr == "[]\n"


def test_a_pipe_gets_what_changes(start):
    job = start(report_of((10.0, 40.0), slow=[1]))
    live = subprocess.Popen(
        [*COMMAND, "watch", job.address, "--interval", "0.05", *PATIENTLY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    try:
        seen = [live.stdout.readline() for _ in range(5)]
        publish(job.state, report_of((10.0, 77.0), unix_time=1001.0))
        while "77" not in seen[-1] and live.poll() is None:
            seen.append(live.stdout.readline())
        live.stdout.close()  # as head does
        publish(job.state, report_of((10.0, 78.0), unix_time=1002.0))
        assert live.wait(300) == 0
        assert live.stderr.read() == ""
        live.stderr.close()
    finally:
        live.kill()
    assert "".join(seen).isascii()
    assert "\x1b" not in "".join(seen)
