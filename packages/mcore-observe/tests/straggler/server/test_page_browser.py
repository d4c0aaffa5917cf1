"""The page of a job in Chromium: who is named, what the switch does, what cannot be smuggled in."""

import http.server
import io
import itertools
import json
import os
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore.observe.straggler.detector import StragglerDetector
from mcore.observe.straggler.server.controller import StragglerController
from mcore.observe.straggler.server.page_history import History
from mcore.observe.straggler.server.routes import ControllerState
from rank_testing import run_ranks

TOKEN = "0123456789abcdef"
WAIT_S = 240

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.needs("chromedriver")]


class Browser:
    """A headless Chromium, and what the tests read from it."""

    def __init__(self, chromium):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for option in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP evil.example 127.0.0.1",
        ):
            options.add_argument(option)
        self.driver = webdriver.Chrome(
            options=options, service=Service(shutil.which("chromedriver"))
        )
        self.driver.set_script_timeout(WAIT_S)

    def open(self, address, *, width=1280, height=900, scheme="light"):
        """Open the page in a window of a size, with nothing stored from the one before."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get("http://{}:{}/ui".format(*address))

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def text(self, css):
        return self.run("return document.querySelector(arguments[0])?.textContent", css)

    def click(self, css):
        """Click on what is there now: the page makes some elements anew with each report."""
        self.run("document.querySelector(arguments[0]).click()", css)

    def type(self, css, text):
        self.driver.find_element("css selector", css).send_keys(text)

    def wait(self, css, words):
        """Wait until the text of an element has some words, and return it."""
        return self.until(lambda: (text := self.text(css)) and words in text and text, css, words)

    def until(self, condition, *what):
        deadline = time.monotonic() + WAIT_S
        while not (found := condition()):
            state = {css: self.text(css) for css in ("#verdict", "#fresh", "#token-error")}
            assert time.monotonic() < deadline, (what, state)
            time.sleep(0.05)
        return found

    def complaints(self):
        """What the console has, without requests that were refused or found nobody."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [one for one in messages if "Failed to load resource" not in one]


@pytest.fixture(scope="module")
def browser(chromium):
    opened = Browser(chromium)
    yield opened
    opened.driver.quit()


@pytest.fixture
def serve(simulated_job, monkeypatch):
    """Starts the controller of a simulated job after some reports of the times given."""
    monkeypatch.setattr(History, "age_s", lambda self: 1.0)  # however long the browser takes
    started = []

    def start(times_of, *, world, reports=8, hosts=(), sections=(), token=None):
        state = ControllerState(rank=0, world_size=world, enabled=True)
        controller = StragglerController(
            state, bind="127.0.0.1", port=0, token=token, allow_get_toggle=False
        )
        started.append(controller)
        job = simulated_job(world, sections, hosts)
        metrics = torch.full((7, world), torch.nan, dtype=torch.float64)
        made, begun = [], time.time() - 30 * reports
        for number in range(12):  # the first eight are not shown: they measure the noise
            metrics[0] = times_of(number)
            sums = metrics[0].expand(len(job.names), world) * 5
            made.append(job.report(metrics, sums))
        for number in range(reports):  # the last ones again and again: judging takes long
            found = made[8 + min(number, 2 + number % 2)]
            found.unix_time = begun + 30 * number
            state.applied(True, found)
        return state, controller.address

    yield start
    for controller in started:
        controller.close()


def slow_job(folder):
    """Four ranks, of which rank 1 takes six times as long, until a file says that it is over.

    By clocks that are set by hand: a busy machine would have slow ranks of its own.
    """
    rank, detector, over = dist.get_rank(), StragglerDetector(), torch.zeros(1)
    detector.configure(4, rank, port=0, enabled=True, token=TOKEN, sections=["attention"])
    if rank == 0:
        port = Path(folder, "port.part")
        port.write_text(str(detector.controller_address[1]))
        port.rename(Path(folder, "port"))
    loss, now_ns = 4.0, [0]
    detector._now_ns = lambda: now_ns[0]
    while not over.item():
        for _ in range(5):
            with detector, detector.section("attention"):
                now_ns[0] += (30 if rank == 1 else 5) * 1_000_000
        time.sleep(0.1)
        detector.report(1e9, 5)
        loss *= 0.99
        detector.show(**{"lm loss": loss, "grad norm": 1.5})
        over.fill_(float(os.path.exists(Path(folder, "over"))))
        dist.broadcast(over, src=0)
    detector.close()
    return detector.last_report.world_size


@pytest.fixture
def running(tmp_path):
    """The address of four real ranks, and a function that ends them."""
    results = []

    def run():
        results.extend(run_ranks(slow_job, 4, str(tmp_path), timeout_s=1200))

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        (tmp_path / "over").touch()
        thread.join(WAIT_S)
        return results

    try:
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "port").exists():
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield ("127.0.0.1", int((tmp_path / "port").read_text())), end
    finally:
        end()


def status(address, token):
    url = "http://{}:{}/status".format(*address)
    headers = {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=120
    ) as answer:
        return json.load(answer)


def rows_of_map(browser, num_rows):
    """The mean colour of each row in a screenshot of the map, near its first report."""
    from PIL import Image

    png = browser.driver.find_element("css selector", "#map").screenshot_as_png
    image = Image.open(io.BytesIO(png)).convert("RGB")
    means, height = [], image.height
    for row in range(num_rows):
        top, bottom = ((row + end) * height / num_rows for end in (0.3, 0.7))
        part = image.crop((54, int(top), 60, int(bottom)))
        means.append(part.resize((1, 1)).getpixel((0, 0)))
    return means


@pytest.mark.slow
def test_a_running_job_with_a_slow_rank(browser, running):
    """Four gloo ranks and a token: named, switched off and on, gone."""
    address, end = running
    browser.open(address)
    browser.wait("#fresh", "Waiting for the token")
    assert browser.run("return document.querySelector('#main').hidden")
    assert socket.gethostname() not in browser.driver.page_source
    browser.type("#token", "wrong\n")
    browser.wait("#token-error", "That is not the token.")
    asked = "return fetch('off', {method: 'POST'}).then((answer) => answer.status)"
    assert browser.run(asked) == 401
    assert status(address, TOKEN)["pending"] is None
    browser.type("#token", TOKEN + "\n")

    told = "['#verdict-title', '#verdict-text', '#slow-rows button', '#job']"
    told = f"return {told}.map((css) => document.querySelector(css)?.textContent)"
    title, text, named, job = browser.until(
        lambda: (found := browser.run(told))[0] == "Rank 1 is slow" and found
    )
    assert f"{socket.gethostname()}, cpu" in text
    assert "Since" in text
    assert (title, named, job) == ("Rank 1 is slow", "1", "4 ranks on 1 host")
    names = "return [...document.querySelectorAll('.scalar .name')].map((one) => one.textContent)"
    assert browser.run(names) == ["lm loss", "grad norm"]
    browser.type("#find-rank", "1\n")
    browser.wait("#one-title", "Rank 1")
    assert browser.text("#one-rows").startswith("Round trip")

    browser.click("#switch")
    browser.wait("#verdict-title", "Timing is off")
    assert browser.run("return document.querySelector('#ranks').hidden") is False
    assert status(address, TOKEN)["enabled"] is False
    assert browser.run("return document.querySelector('#switch').ariaChecked") == "false"
    browser.click("#switch")
    browser.until(lambda: status(address, TOKEN)["enabled"])
    browser.wait("#verdict-title", "Rank 1 is slow")

    assert end() == [4] * 4
    browser.wait("#verdict-title", "The job is gone")
    assert "slow when it reported last" in browser.text("#verdict-text")
    assert len(set(rows_of_map(browser, 4))) > 1
    assert [one for one in browser.complaints() if "ERR_CONNECTION" not in one] == []


@pytest.mark.slow
def test_4096_ranks_and_500_reports(browser, serve, monkeypatch):
    """Within the budgets; by mouse, by keyboard, in small and large windows."""
    noise = torch.Generator().manual_seed(0)

    def times_of(number):
        times = 100 * (1 + 0.03 * torch.randn(4096, generator=noise, dtype=torch.float64))
        times[1365] *= 2
        return times

    _, address = serve(times_of, world=4096, reports=500)
    browser.open(address, width=1440, height=1000)
    browser.wait("#verdict-title", "Rank 1365 is slow")
    assert "node170, cuda:5" in browser.text("#verdict-text")
    browser.wait("#range", "All ranks, 8 in a row")
    sizes = browser.run("return performance.getEntries().map((one) => one.decodedBodySize || 0)")
    assert 500_000 < sum(sizes) < 1_000_000  # before gzip, which random times would not help
    frames, deadline = [], time.monotonic() + WAIT_S
    for width in itertools.cycle((900, 880, 860, 840)):
        browser.run("document.querySelector('#ranks').style.width = arguments[0]", f"{width}px")
        browser.run("return new Promise((done) => setTimeout(done, 100))")
        parts = "['draw', 'paint'].map((name) => performance.getEntriesByName(name)[0].duration)"
        frames.append(sum(browser.run(f"return {parts}")))
        if len(frames) >= 4 and min(frames) < 100:  # ms, with every cell coloured anew
            break
        assert time.monotonic() < deadline, frames  # a busy machine interrupts some of them

    browser.run("document.querySelector('#map').focus()")
    browser.wait("#spoken", "ranks 0 to 7 (node000)")
    browser.type("#map", "\ue015\ue015\ue012")  # down, down, left
    spoken = browser.wait("#spoken", "ranks 16 to 23 (node002)")
    assert "worst of 8" in spoken
    browser.type("#map", "\ue007")  # Enter
    browser.wait("#one-title", "Rank ")
    assert 16 <= int(browser.text("#one-title").split()[1]) <= 23
    browser.type("#find-rank", "1365\n")
    browser.wait("#one-title", "Rank 1365")
    assert "node170, cuda:5. Slow since" in browser.text("#one-place")
    browser.type("#map", "+")
    browser.wait("#range", "Ranks 0 to 1023")
    browser.type("#map", "\ue00c")  # Escape
    browser.wait("#range", "All ranks, 8 in a row")

    monkeypatch.setattr(History, "age_s", lambda self: 3600.0)
    browser.wait("#verdict-title", "No report for 1 h 0 min")
    assert browser.text("#verdict-spoken").startswith("No report for 1 h 0 min. They came every")
    assert "Rank 1365 was slow when it reported last." in browser.text("#verdict-text")
    grounds = []
    for width, scheme in ((360, "light"), (3840, "dark")):
        browser.open(address, width=width, height=width * 5 // 9 + 300, scheme=scheme)
        browser.wait("#range", "All ranks")
        assert browser.run("return document.documentElement.scrollWidth") == width
        grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(grounds)) == 2
    assert browser.complaints() == []


def test_names_are_shown_as_they_are(browser, serve):
    """Host, section and scalar names that are HTML, or look like it."""
    host = "<img src=x onerror=document.title=1>"
    section = "<script>document.title='1'</script>"
    scalar = "</style><svg onload=document.title=1>"

    def times_of(number):
        return torch.tensor([100.0, 100.0, 100.0, 300.0], dtype=torch.float64)

    state, address = serve(times_of, world=4, hosts=[host] * 4, sections=[section])
    state.show({scalar: 1.0, "__proto__": 2.0})
    browser.open(address)
    browser.wait("#verdict-title", "Rank 3 is slow")
    *usual, slow = rows_of_map(browser, 4)
    assert usual == [usual[0]] * 3
    assert usual[0][2] - slow[2] > 60  # light blue and dark red
    assert host in browser.text("#verdict-text")
    assert host in browser.text("#slow-rows")
    assert section in browser.text("#metrics")
    assert browser.text(".scalar .name") == scalar
    browser.click("#slow-rows button")
    browser.wait("#one-place", host)
    browser.wait("#one-rows", section)
    assert browser.run("return [document.images.length, document.scripts.length]") == [1, 1]
    assert browser.driver.title.endswith("Rank 3 is slow")
    assert browser.complaints() == []


class OtherSite(http.server.BaseHTTPRequestHandler):
    """A page of another site, which has the controller's address."""

    page = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *arguments):
        pass


def test_other_sites_in_the_same_browser_can_do_nothing(browser, serve):
    """Without a token: neither frame it, nor ask it, nor take its name over."""
    state, address = serve(lambda number: torch.ones(2, dtype=torch.float64), world=2)
    own = "http://{}:{}".format(*address)
    OtherSite.page = f"<title>other</title><iframe src='{own}/ui'></iframe>".encode()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherSite)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        browser.driver.get(f"http://localhost:{server.server_address[1]}/")
        tried = browser.run(
            """
            const asked = [['POST', '/off'], ['POST', '/toggle'], ['GET', '/ui/data']];
            const ask = (method, path, mode) => fetch(arguments[0] + path, {method, mode})
              .then((answer) => answer.type, () => 'refused');
            const modes = ['cors', 'no-cors'];
            return Promise.all(asked.flatMap(([method, path]) =>
              modes.map((mode) => ask(method, path, mode))));
            """,
            own,
        )
        assert set(tried) == {"refused", "opaque"}
        browser.driver.switch_to.frame(0)
        assert "Ranks" not in browser.driver.page_source
        assert browser.run("return document.querySelector('#switch')") is None
        browser.driver.switch_to.default_content()
    finally:
        server.shutdown()
        server.server_close()
    assert state.wanted() is True
    browser.driver.get(f"http://evil.example:{address[1]}/ui")
    assert "send requests to localhost or an IP address" in browser.driver.page_source
    refused = "return fetch('/off', {method: 'POST'}).then((answer) => answer.status)"
    assert browser.run(refused) == 403
    assert state.wanted() is True
    browser.driver.get_log("browser")
