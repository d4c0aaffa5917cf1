"""The spool file when something goes wrong."""

import json
import threading

from mcore.observe.sinks.delivery import spool as spools
from mcore.observe.sinks.delivery.spool import Spool, StepMetrics, read_spool


def ends(function):
    """Return whether a call returns within minutes."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(120)
    return not thread.is_alive()


def test_an_entry_that_cannot_be_written_neither_hangs_the_end_nor_loses_the_others(tmp_path):
    spool = Spool(tmp_path / "spool", "tensorboard", {"tracker": "tensorboard"})
    spool.append(StepMetrics({"a": 1.0}, 1, 0, 1))
    spool.append(StepMetrics({("no", "text"): 1.0}, 2, 0, 2))
    spool.append(StepMetrics({"b": object()}, 3, 0, 3))
    assert ends(spool.sync)
    spool.append(StepMetrics({"c": 2.0}, 4, 0, 4))
    assert ends(spool.sync)
    assert sorted(read_spool(spool.path).entries) == [1, 4]
    assert ends(spool.remove)
    assert not spool.path.exists()


def test_a_disk_that_hangs_while_the_file_is_given_up_or_removed(tmp_path, monkeypatch):
    """Written lines stay if the rest was given up. No file stays if everything has arrived."""
    write, began, gate = spools._write_all, threading.Event(), threading.Event()

    def hang(file, data):
        began.set()
        assert gate.wait(120)
        write(file, data)

    monkeypatch.setattr(spools, "_write_all", hang)
    monkeypatch.setattr(spools, "_ENDING_S", 0.1)
    for is_left in (True, False):
        began.clear()
        gate.clear()
        spool = Spool(tmp_path / "spool", "mlflow", {"tracker": "mlflow"})
        spool.append(StepMetrics({"a": 1.0}, 1, 0, 1))
        assert began.wait(120)
        spool.append(StepMetrics({"a": 2.0}, 2, 0, 2))
        if is_left:
            assert not spool.leave()
        else:
            spool.remove()
        gate.set()
        assert ends(spool._thread.join)
        spool.sync()  # like a sender that notices it late
        assert spool.path.exists() == is_left
        if is_left:
            assert read_spool(spool.path).facts["tracker"] == "mlflow"
            spool.path.unlink()
    assert not (tmp_path / "spool").exists()


def test_a_damaged_line_does_not_hide_the_others(tmp_path):
    spool = Spool(tmp_path / "spool", "mlflow", {"tracker": "mlflow"})
    spool.append(StepMetrics({"a": 1.0}, 1, 0, 1))
    assert spool.sync()
    with spool.path.open("ab") as file:
        file.write(b'{"number": 2, "st\n\x00\x00\x00\n[1]\n')
        entry = {"number": 3, "step": 3, "time_ms": 0, "metrics": {"a": 3.0}}
        file.write(json.dumps(entry).encode() + b"\n")
    contents = read_spool(spool.path)
    assert sorted(contents.entries) == [1, 3]
    assert contents.facts["tracker"] == "mlflow"
    spool.remove()
