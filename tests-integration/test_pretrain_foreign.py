"""A run folder, token cache or MLflow address from somebody else, who wants the user's files."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import os
import shutil
import sqlite3
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pretrain import sample
from pretrain.cli.claim import check_unclaimed, claim
from pretrain.cli.command import main
from pretrain.run.checkpoints import damaged_after
from pretrain.run_folder import RunFolder, refuse_foreign
from pretrain.settings import Settings
from pretrain.text.cache import find_cache, make_cache, open_cache, read_borders
from pretrain.usage import UsageError
from pretrain.watch.mlflow_run import _make_database
from pretrain.watch.mlflow_target import choose_target
from pretrain_runs import OFF, TINY, losses_of, pretrain

PRIVATE = "the user's private text\n" * 400
TOKEN = "a-token-of-the-user"
pytestmark = pytest.mark.xdist_group("waits")  # a job waits for a server at its end


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, in a folder of runs, as an archive of it would be unpacked."""
    folder = tmp_path_factory.mktemp("from-somebody")
    (folder / "text.txt").write_text("a text next to the run\n" * 400)
    words = ("--train-iters", "2", "--run-dir", "runs/run", "--data", "text.txt", "--no-mlflow")
    done = pretrain(folder, *TINY, *words, "--no-tensorboard")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run. Its text is private, outside of the folder of runs."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "token-cache")
    shutil.copy(trained / "text.txt", tmp_path / "runs")
    change_settings(tmp_path / "runs" / "run", data=str(tmp_path / "runs" / "text.txt"))
    return tmp_path / "runs" / "run"


def change_settings(run: Path, **changes: object) -> None:
    config = json.loads((run / "config.json").read_text())
    config["settings"] |= changes
    (run / "config.json").write_text(json.dumps(config))


def refused(run: Path, *words: str, **env: str) -> str:
    """The only line of a start that is refused. It has changed nothing in the run."""
    before = sorted(one.lstat().st_mtime_ns for one in run.rglob("*"))
    done = pretrain(run.parent, "--resume", "run", "--train-iters", "4", *words, entry=main, **env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert sorted(one.lstat().st_mtime_ns for one in run.rglob("*")) == before
    return done.stderr


def replace(path: Path, how: Callable[[Path], None]) -> None:
    if path.is_dir():
        path.rename(path.with_name("elsewhere"))
    path.unlink(missing_ok=True)
    how(path)


LINKED = ("job.lock", "loss.png", "straggler.log", "metrics.jsonl", "slow_ranks.jsonl", "run.html")
KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, file: path.symlink_to(file),
    "second name": lambda path, file: path.hardlink_to(file),
    "pipe": lambda path, file: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_links_is_refused(kind: str, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "private.txt"
    file.write_text(PRIVATE)
    (run / "tensorboard").mkdir()
    others = ("config.json.partial", "mlflow.json", ".hidden", "checkpoints/x", "tensorboard/x")
    for name in (*LINKED, *others):
        path = run / name
        kept = path.read_bytes() if path.exists() else None
        replace(path, lambda path: KINDS[kind](path, file))
        assert f"{name} is a link" in refused(run)
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert file.read_text() == PRIVATE


def test_a_linked_folder_of_checkpoints_is_refused(run: Path, tmp_path: Path) -> None:
    """A save would delete checkpoints there."""
    (tmp_path / "mine").mkdir()
    replace(run / "checkpoints", lambda path: path.symlink_to(tmp_path / "mine"))
    assert "checkpoints is a link" in refused(run)


def test_a_trusted_folder_is_used_and_its_linked_files_are_not_written(
    run: Path, tmp_path: Path
) -> None:
    """The folder itself may be a link of the user."""
    file = tmp_path / "private.txt"
    file.write_text(PRIVATE)
    for name in (
        "loss.png",
        "straggler.log",
        "slow_ranks.jsonl",
        "run.html",
        "config.json.partial",
        "mlflow.json",
        "diverged.txt",
    ):
        replace(run / name, lambda path: path.symlink_to(file))
    (tmp_path / "mine").symlink_to(run)
    words = ("--resume", str(tmp_path / "mine"), "--train-iters", "4", "--trust-run")
    done = pretrain(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "warning: cannot write" in done.stderr
    assert len(losses_of(run)) == 4
    assert file.read_text() == PRIVATE
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "loss.png").is_symlink()
    assert stat.S_IMODE((run / "job.lock").stat().st_mode) == 0o600


def test_a_system_folder_is_of_another_user(tmp_path: Path) -> None:
    """Without root's rights the owner is root."""
    refuse_foreign(tmp_path, "--resume")
    folder = tmp_path if os.geteuid() == 0 else Path("/usr")
    if os.geteuid() == 0:
        os.chown(folder, 54321, -1)
    with pytest.raises(UsageError, match=r"belongs to another user \(\d+\)"):
        refuse_foreign(folder, "--resume")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", [".", "config.json", "checkpoints"])
def test_a_folder_of_another_user_is_refused(name: str, run: Path) -> None:
    os.chown(run / name, 54321, -1)
    assert "belongs to another user (54321). If you trust the folder" in refused(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_new_run_is_refused_in_an_empty_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 54321, -1)
    done = pretrain(tmp_path, *TINY, "--run-dir", "run")
    assert done.returncode == 2
    assert "--run-dir run: run belongs to another user (54321)" in done.stderr


def test_the_database_is_opened_without_following_links(tmp_path: Path) -> None:
    """SQLite would fill an empty file of the user, and change tables in another database."""

    class Client:
        def __init__(self, uri: str) -> None:
            self.path = Path(uri.removeprefix("sqlite:///"))

        def search_experiments(self, max_results: int) -> None:
            self.path.write_text("tables")

    folder, file = RunFolder(tmp_path), tmp_path / "private.txt"
    file.write_text(PRIVATE)
    partial = tmp_path / "mlflow.db.partial"
    for link in (KINDS["link"], KINDS["second name"]):
        link(partial, file)
        _make_database(folder, Client)
        assert folder.mlflow_database.read_text() == "tables"
        replace(folder.mlflow_database, lambda path, link=link: link(path, file))  # type: ignore[misc]
        with pytest.raises(OSError, match="it is a link"):
            _make_database(folder, Client)
        folder.mlflow_database.unlink()
    assert file.read_text() == PRIVATE


def plant_journal(database: Path, file: Path) -> None:
    """Write the journal of an interrupted write to several databases, listed in a file."""
    page = int.from_bytes(database.read_bytes()[16:18], "big")
    magic, name = bytes.fromhex("d9d505f920a163d7"), str(file).encode()
    head = magic + struct.pack(">5I", 0, 1, database.stat().st_size // page, 512, page)
    tail = struct.pack(f">I{len(name)}s2I", 2**30 // page + 1, name, len(name), sum(name)) + magic
    database.with_name(f"{database.name}-journal").write_bytes(head.ljust(512, b"\0") + tail)


def test_the_journal_of_a_database_deletes_no_file_of_the_user(tmp_path: Path) -> None:
    """SQLite deletes the file that the journal names, as the list of several databases."""
    folder, file = RunFolder(tmp_path), tmp_path / "private.txt"
    with contextlib.closing(sqlite3.connect(folder.mlflow_database)) as database:
        database.execute("CREATE TABLE t (a)")
    file.write_text(PRIVATE)
    plant_journal(folder.mlflow_database, file)
    with pytest.raises(OSError, match="it names another file: remove it"):
        _make_database(folder, None)
    assert file.exists()
    with contextlib.closing(sqlite3.connect(folder.mlflow_database)) as database:
        assert database.execute("SELECT * FROM t").fetchall() == []
    assert not file.exists()  # the attack, without the check
    _make_database(folder, None)
    tmp_path.joinpath("mlflow.db-journal").write_bytes(b"short")
    _make_database(folder, None)


def test_a_lock_is_private_and_its_text_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "job.lock").touch(0o644)
    with claim(tmp_path) as held:
        assert stat.S_IMODE(os.fstat(held.fileno()).st_mode) == 0o600
        held.truncate(0)
        held.write(json.dumps({"host": "a\x1b]0;b\x07\u202e" + 999 * "c", "pid": 7}))
        held.flush()
        with pytest.raises(UsageError) as caught:
            check_unclaimed(tmp_path)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
        for text in (b"\xff\xfe", b"[" * 9999, b"[]"):
            os.pwrite(held.fileno(), text.ljust(9999), 0)
            with pytest.raises(UsageError, match="unknown host"):
                check_unclaimed(tmp_path)


def test_a_folder_in_place_of_a_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.lock").mkdir()
    for use in (claim, check_unclaimed):
        with pytest.raises(UsageError, match=r"cannot (read|write) .*job\.lock"):
            use(tmp_path)


def test_escapes_in_settings_do_not_reach_the_terminal(run: Path) -> None:
    change_settings(run, **{"\x1b[2Jowned": 1})
    assert r"unknown settings: \x1b[2Jowned" in refused(run)
    (run / "config.json").write_text("[" * 100_000)
    assert "config.json is not from this job" in refused(run)


def test_escapes_in_a_damaged_checkpoint_do_not_reach_the_terminal(run: Path) -> None:
    checkpoint = RunFolder(run).checkpoint(9)
    checkpoint.mkdir()
    (checkpoint / ".metadata").write_bytes(b"\x80\x02cos\x1b[2J\nsystem\n.")
    shutil.rmtree(RunFolder(run).checkpoint(2))
    assert (
        r"(.metadata cannot be read (UnpicklingError: it refers to os\x1b[2J.system))"
        in refused(run)
    )
    assert damaged_after(RunFolder(run), 0)[checkpoint].isprintable()


def test_escapes_of_a_model_do_not_reach_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model can be made to say anything. Here the prompt does."""
    words = ["--run", str(run), "--tokens", "1", "\x1b[2Jx"]
    assert sample.main(words) == 0
    assert capsys.readouterr().out.startswith("\x1b[2Jx")  # to a file or a program
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sample.main(words) == 0
    assert capsys.readouterr().out.startswith(r"\x1b[2Jx")


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server that refuses every request. Yields its address and the headers that it has got."""
    found: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(str(self.headers))
            self.send_error(400)

        do_GET = do_POST  # noqa: N815  # the server's name

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", found
        server.shutdown()


@pytest.mark.parametrize("words", [(), ("--trust-run",)])
def test_a_server_that_only_the_folder_names_gets_no_credentials(
    words: tuple[str, ...], run: Path, tmp_path: Path
) -> None:
    change_settings(run, mlflow=True)
    (tmp_path / "netrc").write_text("default login me password another-secret\n")
    with listener() as (uri, found):
        (run / "mlflow.json").write_text(json.dumps({"tracking_uri": uri, "run_id": "1"}))
        done = pretrain(
            run.parent, "--resume", "run", "--train-iters", "4", *words, entry=main,
            MLFLOW_TRACKING_TOKEN=TOKEN, NETRC=str(tmp_path / "netrc"), HOME=str(tmp_path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found
    warned = f"the run folder names {uri}, which gets metrics but no credentials"
    assert (warned in done.stderr) == (not words)
    with_credentials = ["uthorization" in headers for headers in found]
    assert all(with_credentials) if words else not any(with_credentials)


def test_the_environment_decides_before_the_folder(run: Path) -> None:
    (run / "mlflow.json").write_text(json.dumps({"tracking_uri": "http://h\x1b"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://mine")
        target = choose_target(RunFolder(run), None)
        assert (target.uri, target.is_foreign, target.instead_of) == (
            "http://mine", False, r"http://h\x1b",
        )  # fmt: skip
        (run / "mlflow.json").write_text(json.dumps({"tracking_uri": "http://h"}))
        assert choose_target(RunFolder(run), None, trusted=True).uri == "http://h"
        assert choose_target(RunFolder(run), "http://given").uri == "http://given"


def test_an_address_that_cannot_be_used_without_credentials_is_refused(
    run: Path, tmp_path: Path
) -> None:
    change_settings(run, mlflow=True)
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    for uri, why in (
        (
            "http://127.0.0.1:9",
            "would get the credentials in ~/.mlflow/credentials. Pass --mlflow-uri http://127.0",
        ),
        (f"sqlite:///{tmp_path}/mine.db", "a database that only the folder names"),
        ("http://h/\x1b[2J", r"it logs to http://h/\x1b[2J, which"),
        (["http://h"], "must start with http"),
    ):
        (run / "mlflow.json").write_text(json.dumps({"tracking_uri": uri}))
        assert why in refused(run, HOME=str(tmp_path))
    assert not (tmp_path / "mine.db").exists()


def test_a_private_text_that_only_the_folder_names_is_not_read(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "private.txt"
    file.write_text(PRIVATE)
    link = run.parent / "linked.txt"
    link.symlink_to(file)
    hidden = run.parent / ".hidden"
    hidden.write_text(PRIVATE)
    for path in (file, link, hidden):
        change_settings(run, data=str(path))
        assert f"its config.json names {path}, outside" in refused(run)
    assert not (run.parent / "token-cache").exists()
    # A text of this folder is read. It is not kept if it is not the run's.
    for text, words in ((run.parent / "other.txt", ()), (file, ("--data", str(file)))):
        text.write_text(PRIVATE)
        change_settings(run, data=str(text))
        assert "differs from the text of the run to resume" in refused(run, *words)
        assert list((run.parent / "token-cache").iterdir()) == []
    assert stat.S_IMODE((run.parent / "token-cache").stat().st_mode) == 0o700


def test_a_cache_that_only_the_folder_names_is_not_made_elsewhere(
    run: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "of-the-user" / "cache"
    change_settings(run, data_cache=str(elsewhere))
    assert f"its config.json names {elsewhere}, outside" in refused(run)
    words = ("--data", str(run.parent / "text.txt"))
    assert f"pass --data-cache {elsewhere} or --trust-run" in refused(run, *words)
    assert not elsewhere.parent.exists()
    (run.parent / "text.txt").write_text(PRIVATE)
    assert "differs from the text" in refused(run, "--data-cache", str(elsewhere))
    assert elsewhere.exists()


def make_tokens(folder: Path) -> Settings:
    (folder / "text.txt").write_text(PRIVATE)
    settings = Settings(data=str(folder / "text.txt"), packed=True, **OFF)
    make_cache(settings, find_cache(settings, folder / "run"))
    return settings


def test_a_token_cache_is_private_and_is_not_believed(tmp_path: Path) -> None:
    settings = make_tokens(tmp_path)
    cache = find_cache(settings, tmp_path / "run")
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    files = (cache.tokens, cache.borders, cache.facts)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    make_cache(settings, cache)  # checks it
    facts = json.loads(cache.facts.read_text())
    for change, message in (
        ({"kind": "O"}, "'O' is none of <u1, <u2, <u4"),
        ({"kind": "<u8"}, "'<u8' is none of"),
        ({"kind": ["<u1"]}, "is none of"),
        ({"count": -1}, "-1 tokens of type <u1 were written"),
        ({"count": "many"}, "invalid literal"),
        ({"count": math.inf}, "cannot convert float infinity"),
    ):
        cache.facts.write_text(json.dumps(facts | change))
        with pytest.raises(UsageError, match=message):
            open_cache(cache)
    for text in ("[" * 100_000, "[]", "1", ""):
        cache.facts.write_text(text)
        with pytest.raises(UsageError, match="cannot be read"):
            open_cache(cache)
    cache.facts.write_text(json.dumps(facts))
    for borders in ([0, 9, 5, facts["count"]], [-8, facts["count"]]):
        cache.borders.write_bytes(np.array(borders, "<i8").tobytes())
        with pytest.raises(UsageError, match="documents of the token cache"):
            read_borders(cache)
    for path in files:
        kept = path.read_bytes()
        for kind in KINDS.values():
            replace(path, lambda path, kind=kind: kind(path, tmp_path / "text.txt"))  # type: ignore[misc]
            with pytest.raises(UsageError, match=f"{path.name} is no plain file"):
                make_cache(settings, cache)
        path.unlink()
        path.write_bytes(kept)
    tokens = bytearray(cache.tokens.read_bytes())
    tokens[100] ^= 1
    cache.tokens.write_bytes(tokens)
    with pytest.raises(UsageError, match="its checksum is"):
        make_cache(settings, cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_token_cache_of_another_user_is_refused(tmp_path: Path) -> None:
    settings = make_tokens(tmp_path)
    cache = find_cache(settings, tmp_path / "run")
    for path in (cache.folder, cache.tokens, cache.borders, cache.facts):
        os.chown(path, 54321, -1)
        with pytest.raises(UsageError, match="belongs to another user"):
            make_cache(settings, cache)
        os.chown(path, os.geteuid(), -1)
    make_cache(settings, cache)
