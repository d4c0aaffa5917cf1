"""A run's folder from somebody else: its address, its paths, and its damaged lines."""

import base64
import http.server
import json
import sys
import threading
import time
import zipfile

import pytest

from mcore.observe.__main__ import main
from mcore.observe.sinks.delivery.spool import read_spool
from rank_testing import run_ranks

TOKEN = "s3cret-of-the-user"


class Stranger(http.server.BaseHTTPRequestHandler):
    """The server of somebody else, which keeps all that it gets."""

    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.server.received.append(f"{self.path}\n{self.headers}\n{self.rfile.read(length)}")
        self.send_error(403)

    def do_POST(self):
        self.do_GET()

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def stranger():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Credentials in every place where MLflow and requests look for them."""
    home = tmp_path / "home"
    (home / ".mlflow").mkdir(parents=True)
    (home / ".mlflow" / "credentials").write_text(
        f"[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = {TOKEN}\n"
    )
    (home / ".netrc").write_text(f"machine 127.0.0.1 login me password {TOKEN}\n")
    (home / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return home


def make_run(folder, uri, *, lines=(), tracker="mlflow", **settings):
    """Write what a killed process leaves behind."""
    (folder / "spool").mkdir(parents=True)
    settings = {"mlflow_experiment": "e", "mlflow_run_name": "r", **settings}
    facts = {"tracker": tracker, "settings": {**settings, "mlflow_tracking_uri": uri}}
    entry = {"number": 1, "step": 1, "time_ms": 5, "metrics": {"lm loss": 2.5}}
    written = [json.dumps({"facts": {**facts, "params": {}}}), json.dumps(entry), *lines]
    path = folder / "spool" / f"{tracker}-0-1-a.spool.jsonl"
    path.write_text("\n".join(written) + "\n")
    return path


def has_secret(server):
    packed = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    return any(TOKEN in text or packed in text for text in server.received)


@pytest.mark.slow  # it imports MLflow
@pytest.mark.needs("mlflow")
def test_an_address_of_the_folder_gets_metrics_but_no_credentials(tmp_path, stranger, home, capsys):
    uri = f"http://127.0.0.1:{stranger.server_address[1]}"
    make_run(tmp_path / "run", uri)
    assert main(["replay", str(tmp_path / "run")]) == 1
    assert stranger.received
    assert not has_secret(stranger)
    out = capsys.readouterr().out
    assert f"sent without credentials to {uri}" in out
    assert "--trust-run" in out
    assert main(["replay", str(tmp_path / "run"), "--trust-run"]) == 1
    assert has_secret(stranger)
    assert main(["replay", str(tmp_path / "run"), "--mlflow-uri", uri]) == 1
    assert (tmp_path / "run" / "spool").exists()


@pytest.mark.slow
@pytest.mark.needs("mlflow")
def test_the_environment_decides_before_the_folder(
    tmp_path, stranger, home, monkeypatch, capsys, mlflow_database
):
    uri = f"http://127.0.0.1:{stranger.server_address[1]}"
    make_run(tmp_path / "run", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database(tmp_path / "mine.db"))
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert stranger.received == []
    out = capsys.readouterr().out
    assert f"MLFLOW_TRACKING_URI is used, not {uri}" in out
    assert "1 values sent" in out


OTHERS = ("postgresql://host/runs", "databricks", "http://***@host", "sqlite:///mine", "sqlite://")


@pytest.mark.parametrize("uri", OTHERS)
def test_other_addresses_of_a_folder_need_trust_or_an_argument(tmp_path, home, uri, capsys):
    """MLflow would make a file where the folder wants it, or tables in a database of the user."""
    make_run(tmp_path / "run", uri)
    assert main(["replay", str(tmp_path / "run")]) == 1
    assert "give --mlflow-uri" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def replay_here(folder):
    sys.argv = ["replay", "argument-of-the-user"]
    sys.stdout.write("output-of-the-user\n")
    return main(["replay", str(folder)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tracker",
    [
        pytest.param(name, marks=pytest.mark.needs(module))
        for name, module in (("comet", "comet_ml"), ("wandb", "wandb"))
    ],
)
def test_a_folder_has_nothing_of_the_process_sent(tracker, tmp_path, offline):
    """It wants the code, the output and the environment, in the account of its author."""
    wanted = dict.fromkeys(
        (f"{tracker}_log_{part}" for part in ("code", "console", "environment")), True
    )
    made = {"comet_project": "p", "comet_api_key": "of-the-author", "wandb_project": "p"}
    make_run(tmp_path / "run", None, tracker=tracker, wandb_save_dir="x", **made, **wanted)
    env = offline(tmp_path) | {"WANDB_CONSOLE": None, "WANDB_X_DISABLE_META": None}
    env |= {"COMET_DISABLE_AUTO_LOGGING": None, "COMET_AUTO_LOG_ENV_DETAILS": None}
    (code,) = run_ranks(replay_here, 1, tmp_path / "run", init=None, env=env, timeout_s=300)
    assert code == 0
    content = {path: path.read_bytes() for path in tmp_path.glob("run/wandb/*/*.wandb")}
    for path in tmp_path.glob("comet/*.zip"):  # with the author's key it is not written
        with zipfile.ZipFile(path) as archive:
            content |= {name: archive.read(name) for name in archive.namelist()}
    assert b"lm loss" in b"".join(content.values())
    for private in (b"of-the-user", b"standard_output", b"file_upload", b"installed_packages"):
        assert not [name for name, found in content.items() if private in found]
    assert not list(tmp_path.glob("run/wandb/**/requirements.txt"))


@pytest.mark.slow
@pytest.mark.needs("mlflow")
def test_hostile_lines_are_skipped_with_one_line(tmp_path, home, caplog, capsys, mlflow_database):
    entry = {"number": 2, "step": 2, "time_ms": 5, "metrics": {"lm loss": 2.0}}
    hostile = [
        json.dumps({"arrived": [[10**13, 1]]}),  # less than nothing
        json.dumps({"arrived": [[1, 10**12]]}),
        json.dumps({"arrived": [[-(10**12), 1]]}),
        json.dumps({"arrived": 7}),
        json.dumps({"facts": [1, 2, 3]}),
        json.dumps({**entry, "metrics": {"lm loss": "2.0"}}),
        json.dumps({**entry, "metrics": {"lm loss": 10**400}}),
        json.dumps({"metrics": {"lm loss": 1.0}}),
        "[" * 100_000 + "]" * 100_000,
        '{"metrics":' * 100_000,
    ]
    uri = mlflow_database(tmp_path / "m.db")
    path = make_run(tmp_path / "run", uri, lines=[*hostile, json.dumps(entry)])
    began = time.thread_time()
    assert sorted(read_spool(path).entries) == [1, 2]
    assert time.thread_time() - began < 10
    assert [record.message for record in caplog.records] == [
        f"{path}: line 3 is damaged and was skipped"
    ]
    assert main(["replay", str(tmp_path / "run"), "--mlflow-uri", uri]) == 0
    assert "2 values sent" in capsys.readouterr().out


def test_a_file_without_facts_is_one_clear_line(tmp_path, capsys):
    path = tmp_path / "spool" / "mlflow-0-1-a.spool.jsonl"
    path.parent.mkdir()
    for text in ("", '{"facts": {"tracker": "other", "settings": {}}}\n'):
        path.write_text(text)
        assert main(["replay", str(tmp_path)]) == 1
        assert "does not name its tracker and settings" in capsys.readouterr().err
