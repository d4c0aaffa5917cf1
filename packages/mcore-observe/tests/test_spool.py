"""The file that keeps what trackers have not taken, when things go wrong."""

import json
import threading

from mcore.observe.sinks.spool import Spool, StepMetrics, read_spool


def ends(function):
    """Whether a call returns within seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
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
