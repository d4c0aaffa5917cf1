"""What the page gives away, and to whom: nothing that the token guards."""

import http.client
import json

import pytest
import torch

from mcore.observe.straggler.server.controller import StragglerController
from mcore.observe.straggler.server.routes import ControllerState

FILES = ("/ui", "/ui/app.js", "/ui/map.js", "/ui/style.css", "/ui/icon.svg")
ASKED = ("/ui/data", "/ui/rank?rank=0")
TOKEN = {"Authorization": "Bearer s3cret"}
HOST = "host-of-the-job"


@pytest.fixture(params=[None, "s3cret"], ids=["without a token", "with a token"])
def token(request):
    return request.param


@pytest.fixture
def job(token, simulated_job):
    """The state of a job whose controller listens, and a function that asks it."""
    state = ControllerState(rank=0, world_size=2, enabled=False)
    controller = StragglerController(
        state, bind="127.0.0.1", port=0, token=token, allow_get_toggle=False
    )
    values = torch.full((7, 2), 5.0, dtype=torch.float64)
    state.applied(False, simulated_job(2, hosts=[HOST, HOST]).report(values))
    state.show({"secret loss": 1.0})

    def ask(path, headers=None, method="GET"):
        connection = http.client.HTTPConnection(*controller.address, timeout=120)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer, answer.read().decode()
        finally:
            connection.close()

    yield state, ask, "http://{}:{}".format(*controller.address)
    controller.close()


def test_the_files_hold_nothing_of_the_job_and_are_locked_in(job):
    _, ask, _ = job
    types = [ask(path)[0].getheader("Content-Type").partition(";")[0] for path in FILES]
    script = "text/javascript"
    assert types == ["text/html", script, script, "text/css", "image/svg+xml"]
    for path in FILES:
        answer, text = ask(path)
        assert answer.status == 200
        assert HOST not in text
        assert "secret loss" not in text
        policy = answer.getheader("Content-Security-Policy").split("; ")
        policy = dict(one.split(" ", 1) for one in policy)
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.getheader("X-Frame-Options") == "DENY"
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cross-Origin-Opener-Policy") == "same-origin"
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing from outside
    _, page = ask("/ui")
    assert " style=" not in page
    assert (
        page.count("<script") == page.count('<script type="module" src="ui/app.js"></script>') == 1
    )


@pytest.mark.xdist_group("waits")
def test_what_the_page_asks_needs_the_token(job, token):
    state, ask, own = job
    wrong = ({}, *({"Authorization": one} for one in ("Bearer x", "Basic czNjcmV0", "s3cret")))
    for headers in wrong if token else ():
        for path in (*ASKED, "/ui/data?token=s3cret", "/ui/", "/ui/../status", "/ui?x"):
            answer, text = ask(path, headers)
            assert answer.status == (200 if path == "/ui?x" else 401)
            assert HOST not in text
        for path in ("/on", "/ui", "/ui/data"):
            assert ask(path, {**headers, "Origin": own}, "POST")[0].status == 401
    assert state.wanted() is False
    headers = TOKEN if token else {}
    shown = json.loads(ask("/ui/data", headers)[1])
    assert (shown["hosts"], shown["scalars"][0]["name"]) == ([[HOST, 2]], "secret loss")
    assert json.loads(ask("/ui/rank?rank=1", headers)[1])["host"] == HOST
    own_page = {**headers, "Origin": own, "Sec-Fetch-Site": "same-origin"}
    assert ask("/on", own_page, "POST")[0].status == 202
    assert state.wanted() is True


@pytest.mark.parametrize(
    "marks",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "https://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "script"},
    ],
    ids=str,
)
def test_other_sites_get_nothing(job, marks):
    state, ask, _ = job
    for path in (*FILES, *ASKED):
        answer, text = ask(path, {**TOKEN, **marks})
        assert (answer.status, HOST in text) == (403, False)
        assert answer.getheader("Access-Control-Allow-Origin") is None
    for path in ("/on", "/toggle"):
        assert ask(path, {**TOKEN, **marks}, "POST")[0].status == 403
    assert state.wanted() is False


def test_a_link_leads_to_the_page_alone(job):
    state, ask, _ = job
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}
    assert ask("/ui", link)[0].status == 200
    for path in (*FILES[1:], *ASKED, "/report", "/status"):
        assert ask(path, {**TOKEN, **link})[0].status == 403
    for path in ("/ui", "/on"):
        assert ask(path, {**TOKEN, **link}, "POST")[0].status == 403
    assert state.wanted() is False


def test_a_name_that_was_pointed_here_gets_nothing(job, token):
    """To the browser that page is of one origin with the controller."""
    state, ask, _ = job
    rebound = {"Host": "evil.example:80", "Sec-Fetch-Site": "same-origin"}
    for path in (*FILES, *ASKED):
        answer, text = ask(path, rebound)
        expected = (200 if path in FILES else 401) if token else 403
        assert (answer.status, HOST in text) == (expected, False)
    for path in ("/on", "/toggle"):
        marks = {**rebound, "Origin": "http://evil.example:80"}
        assert ask(path, marks, "POST")[0].status == (401 if token else 403)
    assert state.wanted() is False
