"""The common behaviour of all sinks, with their real clients, read back from their files."""

import json
import logging
import math
import os
import struct
import time
import zipfile
from collections import defaultdict

import pytest
import torch

from mcore.observe import (
    CometSink,
    ConfigContainer,
    GlobalState,
    JsonlSink,
    LoggerConfig,
    MemorySink,
    MlflowSink,
    TensorBoardSink,
    WandbSink,
)
from mcore.observe.sinks import GuardedSink, MetricSink
from mcore.observe.sinks.trackers import TRACKERS
from rank_testing import preload, run_ranks

preload("mcore.observe", "mlflow.store.tracking.sqlalchemy_store")
INF = math.inf
LARGEST = 1.7976931348623157e308  # the number that MLflow stores for an infinity
NOT_A_NUMBER = "nan"

KINDS = {  # with the modules that each needs
    "memory": (),
    "jsonl": (),
    **{spec.name: ("tensorboard", spec.module.partition(".")[0]) for spec in TRACKERS},
}

NUMBERS = {
    "tensor": torch.tensor(2.5),
    "one element": torch.tensor([[7]]),
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
    "int": 3,
    "bool": True,
}
NO_NUMBERS = {"nothing": None, "many": torch.ones(2), "text": "2.5"}
ODD_NAMES = ("acc@5 (%)", "a//b/c", "", "/start", "..", "\u00fc\n", "x" * 300, "end/")


class Steps(dict):
    """A dict whose methods can be replaced."""


class File:
    """A file whose methods can be replaced."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        return self.file.write(data)


def open_memory(folder):
    sink = MemorySink()
    sink.steps = Steps()
    return sink, (sink.steps, "setdefault"), sink.steps


def read_memory(folder, steps):
    return by_name((name, s, value) for s, got in steps.items() for name, value in got.items())


def open_jsonl(folder):
    sink = JsonlSink(folder / "metrics.jsonl")
    sink._open()
    sink._file = File(sink._file)
    return sink, (sink._file, "write"), None


def read_jsonl(folder, _):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return by_name(
        (name, line["step"], value)
        for line in lines
        for name, value in line.items()
        if name not in ("step", "time")
    )


def configured(**settings):
    return GlobalState(ConfigContainer(logger=LoggerConfig(closing_s=100.0, **settings)))


def open_tensorboard(folder):
    writer = configured(tensorboard_dir=folder).tensorboard_logger
    return TensorBoardSink(writer), (writer, "add_scalar"), None


def read_tensorboard(folder, _):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return by_name((tag, e.step, e.value) for tag in tags for e in events.Scalars(tag))


def open_mlflow(folder):
    run = configured(
        mlflow_experiment="contract",
        mlflow_run_name="one",
        mlflow_tracking_uri=f"sqlite:///{folder}/mlflow.db",
    ).mlflow_logger
    run.open()
    return MlflowSink(run), (run.client, "log_batch"), run


def read_mlflow(folder, run):
    names = run.client.get_run(run.run_id).data.metrics
    histories = {name: run.client.get_metric_history(run.run_id, name) for name in names}
    return by_name(
        (name, m.step, m.value)
        for name, history in histories.items()
        for m in sorted(history, key=lambda m: (m.timestamp, m.step))
    )


def open_wandb(folder):
    run = configured(
        wandb_project="contract", wandb_exp_name="one", wandb_save_dir=str(folder)
    ).wandb_logger
    return WandbSink(run), (run.open().run, "log"), None


def read_wandb(folder, _):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in leveldb_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            history = record.history
            items = {i.key or "/".join(i.nested_key): i.value_json for i in history.item}
            step = history.step.num
            rows += [(n, step, json.loads(t)) for n, t in items.items() if n[:1] != "_"]
    return by_name(rows)


def leveldb_records(data, header=7, block=32768):
    """Yield the records of a W&B file, which has the format of LevelDB's log."""
    assert data[:4] == b":W&B"
    at, parts = header, b""
    while at < len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def open_comet(folder):
    experiment = configured(comet_project="contract", comet_experiment_name="one").comet_logger
    return CometSink(experiment), (experiment.open(), "log_metrics"), None


def read_comet(folder, _):
    (path,) = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = map(json.loads, archive.read("messages.json").splitlines())
        metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    return by_name(
        (m["metricName"], m["step"], float(m["metricValue"]))
        for m in metrics
        if m["metricName"] != "process duration"
    )


def by_name(rows):
    history = defaultdict(list)
    for name, step, value in rows:
        if isinstance(value, str):
            value = float(value)
        history[name].append((step, NOT_A_NUMBER if value != value else value))
    return dict(history)


def session(kind, folder):
    """Log everything that a run may log through one sink, in a separate process; read it back."""
    os.chdir(folder)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("mcore.observe").addHandler(handler)

    open_, read = globals()[f"open_{kind}"], globals()[f"read_{kind}"]
    sink, (owner, method), handle = open_(folder)
    assert isinstance(sink, MetricSink)
    guarded = GuardedSink(kind, sink)
    guarded.log({"order": 1.0}, 1)
    guarded.log({"order": 2.0}, 2)
    guarded.log({"again": 2.5}, 2)
    guarded.log({"order": 3.0, "nan": math.nan, "inf": INF, "-inf": -INF, "zero": 0.0}, 3)
    guarded.log({"order": 4.0, **NUMBERS, **NO_NUMBERS}, 4)
    guarded.log({name: float(i) for i, name in enumerate(ODD_NAMES)}, 5)
    guarded.flush()
    flushed = read(folder, handle) if kind not in ("wandb", "comet") else None
    before_failure = list(records)

    original = getattr(owner, method)

    def failing(*args, **kwargs):
        raise ValueError("refused; token=abcdefgh")

    def slow(*args, **kwargs):
        time.sleep(0.02)
        return original(*args, **kwargs)

    setattr(owner, method, failing)
    guarded.log({"order": 6.0}, 6)
    guarded.flush()
    guarded.log({"order": 6.5}, 6)
    guarded.flush()
    setattr(owner, method, slow)
    for step in range(7, 17):
        guarded.log({"order": float(step)}, step)
    setattr(owner, method, original)
    guarded.close()
    guarded.close()
    guarded.log({"order": 99.0}, 99)
    guarded.flush()
    return {
        "history": read(folder, handle),
        "flushed": flushed,
        "before failure": before_failure,
        "failure": records[len(before_failure) :],
        "is on": guarded.is_on,
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.needs(*modules)) for kind, modules in KINDS.items()
    ],
)
def done(request, tmp_path_factory, offline):
    """The kind of the sink, the result of its session, and its folder."""
    folder = tmp_path_factory.mktemp(request.param)
    (result,) = run_ranks(
        session, 1, request.param, folder, init=None, env=offline(folder), timeout_s=400
    )
    return request.param, result, folder


def test_steps_come_in_order_and_each_once(done):
    kind, result, _ = done
    refused = (
        [(6, 6.0), (6, 6.5)] if kind == "jsonl" else []
    )  # these lines wait and are written later
    expected = [
        *((s, float(s)) for s in range(1, 5)), *refused, *((s, float(s)) for s in range(7, 17))
    ]  # fmt: skip
    after_close = [(99, 99.0)] if kind == "memory" else []
    assert [e for e in result["history"]["order"] if e not in after_close] == expected


def test_a_step_may_come_in_two_calls(done):
    assert done[1]["history"]["again"] == [(2, 2.5)]


def test_nan_and_infinities_and_zero(done):
    kind, result, _ = done
    kept = {
        "jsonl": (None, None, None),
        "mlflow": (NOT_A_NUMBER, LARGEST, -LARGEST),
    }.get(kind, (NOT_A_NUMBER, INF, -INF))
    history = result["history"]
    assert tuple(history[name] for name in ("nan", "inf", "-inf")) == tuple([(3, v)] for v in kept)
    assert history["zero"] == [(3, 0.0)]


def test_tensors_of_one_element_and_other_numbers(done):
    history = done[1]["history"]
    assert [history.get(name) for name in NUMBERS] == [[(4, v)] for v in (2.5, 7, 0.5, 3, 1)]


def test_other_values_than_numbers_are_dropped_and_reported(done):
    _, result, _ = done
    assert not set(NO_NUMBERS) & set(result["history"])
    assert result["before failure"] == [
        ("WARNING", "'many' is not a number but a Tensor and is not logged; give one number"),
        ("WARNING", "'text' is not a number but a str and is not logged; give one number"),
    ]


def test_odd_names_cost_no_value(done):
    kind, result, _ = done
    at_5 = [v for name, history in result["history"].items() for s, v in history if s == 5]
    assert sorted(at_5) == [float(i) for i in range(len(ODD_NAMES))], kind


def test_a_failing_client_is_one_warning_without_secrets_and_the_sink_stays_on(done):
    kind, result, _ = done
    action = "log" if kind in ("memory", "jsonl", "tensorboard") else "flush"
    failures = [record for record in result["failure"] if "refused" in record[1]]
    assert failures == [
        (
            "WARNING",
            f"{kind} failed to {action} metrics, training "
            "continues without them: ValueError: refused; token=***",
        )
    ]
    assert result["is on"]


def test_flushed_metrics_can_be_read_before_the_end(done):
    kind, result, _ = done
    if result["flushed"] is None:
        assert kind in ("wandb", "comet")  # their files are complete when they are closed
    else:
        assert result["flushed"]["order"] == [(s, float(s)) for s in (1, 2, 3, 4)]
        assert result["flushed"]["again"] == [(2, 2.5)]


def test_no_process_outlives_the_session(done, wait_for_helpers):
    _, _, folder = done
    wait_for_helpers(f"WANDB_DATA_DIR={folder}")
