"""The attack: links are planted in a run's folder after it was checked, at every name that is
known then. No write reaches the file that they lead to."""

import errno
import json
import os
import pickle
import socket
import time

import pytest
import torch

from mcore.observe import JsonlSink, LoggerConfig, files, reports
from mcore.observe.files import open_plain, replacing
from mcore.observe.runs import Run, draw_page
from mcore.observe.runs.tables import draw_picture
from mcore.observe.sinks import tensorboard
from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool, StepMetrics
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.jsonl import append_record
from mcore.observe.sinks.run_folder import RunFolder

PRIVATE = '{"step": 1, "loss": 2.0}\n{"step": 9, "loss": 1.0}\nand no end'
LINKS = {
    "link": lambda path, file: path.symlink_to(file),
    "second name": lambda path, file: path.hardlink_to(file),
    "pipe": lambda path, file: os.mkfifo(path),
}
REFUSED = "it is a link, has a second name, or is no file|No such device"  # a pipe without a reader
ENTRY = StepMetrics({"loss": 1.0}, 1, 0, 1)


@pytest.fixture
def private(tmp_path_factory):
    file = tmp_path_factory.mktemp("home") / "private.txt"
    file.write_text(PRIVATE)
    yield file
    assert file.read_text() == PRIVATE


@pytest.fixture(params=LINKS)
def plant(request, private):
    """Replace a path by a link, and link the names of its successors."""

    def link(path, *more):
        partial = f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial"
        guessed = (f"{path.name}.partial", f"{path.name}.{os.getpid()}.partial", partial)
        for name in (path.name, *guessed, *more):
            path.with_name(name).unlink(missing_ok=True)
            LINKS[request.param](path.with_name(name), private)

    return link


def test_metrics(plant, tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    plant(path)
    with pytest.raises(OSError, match=REFUSED):
        sink.log({"loss": 1.0}, 1)
    with pytest.raises(OSError, match=REFUSED):
        JsonlSink(path)
    with pytest.raises(OSError, match=REFUSED):
        append_record(path, {"step": 1})


def test_metrics_of_a_resumed_run(plant, tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resume_step=1)
    plant(path)
    path.unlink()
    path.write_text(PRIVATE)
    sink.log({"loss": 1.5}, 2)
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == [
        '{"step": 1', '{"step": 2',
    ]  # fmt: skip


def test_the_spool(plant, tmp_path, caplog):
    spool = Spool(tmp_path, "mlflow", {})
    plant(spool.path)
    spool.append(ENTRY)
    assert "cannot write" in caplog.text


def test_a_shortened_spool(plant, tmp_path, caplog):
    spool = Spool(tmp_path, "mlflow", {})
    spool.append(ENTRY)
    plant(spool.path.with_suffix(".partial"))
    spool._large_bytes = 0
    spool.settle([ENTRY])
    assert "cannot write" in caplog.text


def test_the_spool_of_an_earlier_start(plant, tmp_path, caplog):
    spool = Spool(tmp_path, "mlflow", {})
    spool.append(ENTRY)
    spool.leave()
    earlier = EarlierSpools(tmp_path, "mlflow", 10)
    [owner] = earlier.of_run("")
    owner.close()
    plant(spool.path)
    assert list(earlier.of_run("")) == []
    assert "cannot send the metrics of an earlier start" in caplog.text


def test_notes_and_settings(plant, tmp_path):
    folder = RunFolder(tmp_path)
    plant(folder.notes)
    folder.note("mlflow", {"run_id": "1"})
    assert folder.run_id("mlflow") == "1"


@pytest.mark.parametrize("kind", ["run.html", "loss.png"])
def test_pages_and_pictures(kind, plant, tmp_path):
    if kind == "loss.png":
        pytest.importorskip("matplotlib")
    path = tmp_path / kind
    plant(path)
    draw = draw_page if kind == "run.html" else draw_picture
    draw([Run("one", {"loss": {1: 2.0, 2: 1.0}})], path)
    assert path.read_bytes().startswith((b"<!DOCTYPE html>", b"<!doctype html>", b"\x89PNG"))
    assert not path.is_symlink()
    assert path.stat().st_nlink == 1


def test_event_files(plant, tmp_path):
    """TensorBoard opens its file itself, at a name of known parts but for the last."""
    pytest.importorskip("tensorboard")
    settings = LoggerConfig(tensorboard_dir=str(tmp_path))
    head = f"{socket.gethostname()}.{os.getpid()}"
    now = int(time.time())
    names = [f"events.out.tfevents.{now + s}.{head}.{n}" for s in range(60) for n in range(20)]
    plant(tmp_path / names[0], *names[1:])
    planted = set(tmp_path.iterdir())
    writer = tensorboard.TRACKER.open(Opening(settings, None))
    writer.add_scalar("loss", 2.5, 1)
    writer.close()
    [path] = set(tmp_path.iterdir()) - planted
    plant(path, f"partial-{path.name}")
    path.unlink()
    for name in planted:
        name.unlink()
    writer = tensorboard.TRACKER.open(Opening(settings, None))
    writer.add_scalar("loss", 2.5, 1)
    writer.close()
    tensorboard.forget_later_events(tmp_path, 0)


def test_memory_snapshots(plant, private, tmp_path, monkeypatch):
    path = tmp_path / "snapshot.pickle"
    plant(path)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [1]})
    reports._save_after_failure(os.fspath(path))
    assert pickle.loads(path.read_bytes()) == {"segments": [1]}


@pytest.mark.xdist_group("transformers")
def test_counters_in_a_trainers_checkpoint(plant, private, tmp_path):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from mcore.observe.adapters import transformers as adapter

    path = tmp_path / "checkpoint-2" / adapter._COUNTERS
    path.parent.mkdir()
    plant(path)
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    state, control = TrainerState(global_step=2, max_steps=4), TrainerControl()
    callback = adapter.ObserveCallback(tmp_path / "run", straggler=False)
    callback.on_train_begin(args, state, control)
    callback.on_save(args, state, control)
    callback.close()
    assert not path.is_symlink()
    assert isinstance(json.loads(path.read_text()), dict)


def test_files_are_opened_without_following_links(plant, tmp_path):
    path = tmp_path / "new"
    plant(path)
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDONLY, os.O_RDWR | os.O_APPEND):
        with pytest.raises(OSError, match=REFUSED):
            open_plain(path, flags)
    with replacing(path, 0o600) as opened:
        opened.write(b"new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_that_appears_after_the_look_is_not_followed(private, tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "islink", lambda path: False)
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(OSError, match="symbolic links") as raised:
        open_plain(tmp_path / "link", os.O_WRONLY | os.O_TRUNC)
    assert raised.value.errno == errno.ELOOP


def test_a_system_without_the_flag_looks_at_the_name(private, tmp_path, monkeypatch):
    """As Windows, where the flag is missing."""
    monkeypatch.setattr(files, "_FLAGS", 0)
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(OSError, match=REFUSED):
        open_plain(tmp_path / "link", os.O_WRONLY | os.O_TRUNC)
    os.close(open_plain(tmp_path / "file", os.O_WRONLY | os.O_CREAT))


def test_an_error_keeps_the_file(tmp_path):
    path = tmp_path / "facts"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as opened:
        opened.write(bytes(1 // (opened.write(b"new") - 3)))
    assert [one.name for one in tmp_path.iterdir()] == ["facts"]
    assert path.read_text() == "old"
