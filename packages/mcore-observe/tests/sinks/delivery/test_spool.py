"""The spool file when something goes wrong."""

import json
import threading

import pytest

from mcore.observe.sinks.delivery import spool as spools
from mcore.observe.sinks.delivery.spool import Spool, SpoolOwner, StepMetrics, read_spool
from rank_testing.scripts import Script


def entry(number, value=1.0):
    return StepMetrics({"a": value}, number, 0, number)


def test_an_entry_that_cannot_be_written_does_not_lose_the_others(tmp_path):
    spool = Spool(tmp_path / "spool", "tensorboard", {"tracker": "tensorboard"})
    spool.append(entry(1))
    spool.append(StepMetrics({("no", "text"): 1.0}, 2, 0, 2))
    spool.append(StepMetrics({"b": object()}, 3, 0, 3))
    spool.append(entry(4))
    assert sorted(read_spool(spool.path).entries) == [1, 4]
    spool.remove()
    assert not spool.path.parent.exists()


def test_a_line_is_in_the_file_when_append_returns_even_if_the_process_is_killed(tmp_path):
    script = Script(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from mcore.observe.sinks.delivery.spool import Spool, StepMetrics\n"
        "spool = Spool(Path(sys.argv[1]), 'mlflow', {'tracker': 'mlflow'})\n"
        "for number in range(1, 501):\n"
        "    spool.append(StepMetrics({'a': 1.0}, number, 0, number))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        str(tmp_path),
    )
    assert script.wait().returncode == -9
    (path,) = tmp_path.iterdir()
    owner = SpoolOwner(path)
    assert list(owner.contents.entries) == list(range(1, 501))
    assert owner.contents.facts == {"tracker": "mlflow"}
    owner.close()


def test_facts_and_arrivals_are_kept_and_a_living_process_owns_the_file(tmp_path):
    spool = Spool(tmp_path / "spool", "mlflow", {"tracker": "mlflow"})
    spool.note({"run_id": "r1"})
    assert not spool.path.exists()  # nothing to keep yet
    for number in (1, 2, 3):
        spool.append(entry(number))
    spool.note({"status": "FAILED"})
    spool.settle([entry(1), entry(3)])
    with pytest.raises(BlockingIOError):
        SpoolOwner(spool.path)
    assert spool.leave()
    contents = read_spool(spool.path)
    assert contents.facts == {"tracker": "mlflow", "run_id": "r1", "status": "FAILED"}
    assert list(contents.entries) == [2]
    spool.settle([entry(2)])  # like a sender that notices it late
    spool.append(entry(4))
    assert list(read_spool(spool.path).entries) == [2]


def test_a_large_file_is_shortened_while_steps_append(tmp_path, monkeypatch):
    monkeypatch.setattr(spools, "_LARGE_BYTES", 20_000)
    spool = Spool(tmp_path / "spool", "mlflow", {"tracker": "mlflow"})
    spool.append(entry(1))
    open_locked, last, sizes = spools._open_locked, 1, []

    def append_meanwhile(path):
        nonlocal last
        thread = threading.Thread(target=spool.append, args=(entry(last + 1),))
        thread.start()  # a training step, while the sender's thread writes the new file
        thread.join()
        last += 1
        return open_locked(path)

    monkeypatch.setattr(spools, "_open_locked", append_meanwhile)
    sent = 0
    while last < 4000:
        last += 1
        spool.append(entry(last))
        if last % 50 == 0:
            first, sent = sent + 1, last - 10  # the last ten are on their way
            spool.settle([entry(number) for number in range(first, sent + 1)])
            sizes.append(spool.path.stat().st_size)
    assert max(sizes) < 60_000  # all of them take 300 kB
    assert spool.leave()
    contents = read_spool(spool.path)
    assert list(contents.entries) == list(range(sent + 1, last + 1))
    assert contents.facts == {"tracker": "mlflow"}
    assert [path.name for path in spool.path.parent.iterdir()] == [spool.path.name]


def test_a_full_disk_is_one_warning(tmp_path, caplog, monkeypatch):
    def fail(file, data):
        raise OSError(28, "No space left on device")

    spool = Spool(tmp_path / "spool", "mlflow", {})
    spool.append(entry(1))
    monkeypatch.setattr(spools, "_write_all", fail)
    for number in (2, 3, 4):
        spool.append(entry(number))
    spool.settle([entry(1)])
    assert not spool.leave()
    assert len(caplog.records) == 1
    assert "metrics not yet delivered are lost" in caplog.text


def test_a_damaged_line_does_not_hide_the_others(tmp_path):
    spool = Spool(tmp_path / "spool", "mlflow", {"tracker": "mlflow"})
    spool.append(entry(1))
    with spool.path.open("ab") as file:
        file.write(b'{"number": 2, "st\n\x00\x00\x00\n[1]\n')
        line = {"number": 3, "step": 3, "time_ms": 0, "metrics": {"a": 3.0}}
        file.write(json.dumps(line).encode() + b"\n")
    contents = read_spool(spool.path)
    assert sorted(contents.entries) == [1, 3]
    assert contents.facts["tracker"] == "mlflow"
    spool.remove()
