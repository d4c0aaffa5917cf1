"""No secret of a configuration reaches a tracker's files, a message or a repr."""

import argparse
import io
import logging
import os
import socket
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
    training_log,
)
from mcore.observe.sinks.delivery.process_end import _ProcessWatch
from mcore.observe.sinks.trackers import TRACKERS
from rank_testing import preload, run_ranks

preload("mcore.observe", "mlflow.store.tracking.sqlalchemy_store")
SECRETS = [f"s3cret-number-{i}" for i in range(10)]


def config_with_secrets(**logger):
    model = SimpleNamespace(
        hf_token=SECRETS[0],
        nested={"secrets": {"db": SECRETS[1]}},
        sources=[{"path": "here", "api_key": SECRETS[2]}],
        args=argparse.Namespace(password=SECRETS[3], size=5),
        database=f"postgresql://me:{SECRETS[4]}@host/db",
        tokens=[SECRETS[5]],
        note=f"uses {SECRETS[6]} of the environment",
    )
    return ConfigContainer(
        logger=LoggerConfig(
            log_interval=1,
            closing_s=120.0,
            mlflow_tags={"team": "a"},
            **logger,
        ),
        train=TrainingConfig(micro_batch_size=1, train_iters=10),
        model=model,
        optimizer={"storage_key": f"s3://x?access_key={SECRETS[7]}"},
    )


def settings_of(spec, folder):
    settings = {spec.wanted_by: str(folder)}
    if spec.named_by is not None:
        settings = {spec.wanted_by: "e", spec.named_by: "r"}
    if spec.name != "comet":  # with a key it would not write offline
        settings["comet_api_key"] = SECRETS[8]
    places = {
        "mlflow_tracking_uri": f"sqlite:///{folder}/mlflow.db",
        "wandb_save_dir": str(folder),
    }
    return settings | {name: places[name] for name in spec.settings if name in places}


def run_with_secrets(tracker, folder):
    (spec,) = (spec for spec in TRACKERS if spec.name == tracker)
    out, records = io.StringIO(), io.StringIO()
    logging.basicConfig(stream=records, level=logging.DEBUG, force=True)
    with redirect_stdout(out), redirect_stderr(out):
        state = GlobalState(
            config_with_secrets(**settings_of(spec, folder)), train_state=TrainState(step=1)
        )
        client = getattr(state, spec.attribute)
        training_log(
            {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
            state.cfg, state, None, None,
        )  # fmt: skip
        (sink,) = state.sinks()

        def fail(*args, **kwargs):
            raise OSError(f"http://me:{SECRETS[4]}@host refused {SECRETS[0]} and {SECRETS[6]}")

        sink.sink.log = fail
        training_log(
            {"lm loss": torch.tensor(2.5)}, {}, 1e-4, None, 1.0, False, 0, None, None, None,
            state.cfg, state, None, None,
        )  # fmt: skip
        for thing in (state, state.cfg.logger, sink, sink.sink, client):
            out.write(repr(thing))
        state.close()
        if tracker == "wandb":
            import wandb

            wandb.teardown()
    return out.getvalue() + records.getvalue()


def all_bytes(folder):
    """Return the content of all files below a folder, including files in archives."""
    found = b""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                found += b"".join(archive.read(name) for name in archive.namelist())
        elif path.is_file():
            found += path.read_bytes()
    return found


@pytest.mark.parametrize(
    "tracker",
    [
        pytest.param(
            spec.name, marks=pytest.mark.needs("tensorboard", spec.module.partition(".")[0])
        )
        for spec in TRACKERS
    ],
)
def test_no_secret_reaches_files_output_or_messages(tracker, tmp_path, offline):
    env = offline(tmp_path, quiet=False) | {"SOME_TOKEN": SECRETS[6]}
    (said,) = run_ranks(run_with_secrets, 1, tracker, tmp_path, init=None, env=env, timeout_s=180)
    written = all_bytes(tmp_path)
    assert b"lm loss" in written
    if tracker != "tensorboard":  # its files have no settings
        assert b"model.hf_token" in written
        assert b"model.args.size" in written
    assert "http://***@host refused *** and ***" in said
    assert "LoggerConfig(" in said
    for secret in SECRETS:
        assert secret not in said, secret
        assert secret.encode() not in written, secret


@pytest.fixture
def refusing_port():
    """A port that is taken, but on which no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_tracker_that_cannot_be_opened_is_an_error_without_its_password(
    monkeypatch, refusing_port, caplog
):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = LoggerConfig(
        mlflow_experiment="e",
        mlflow_run_name="r",
        mlflow_tracking_uri=f"http://me:{SECRETS[0]}@127.0.0.1:{refusing_port}",
        closing_s=0.2,
    )
    state = GlobalState(ConfigContainer(logger=logger))
    state.mlflow_logger.log_metrics({"a": 1.0}, 1)
    with pytest.raises(RuntimeError, match=r"MLflow: MlflowException: .*http://\*\*\*@") as caught:
        state.mlflow_logger.open()
    state.close("KILLED")
    (left,) = Path("mcore-spool").iterdir()
    assert '"metrics": {"a": 1.0}' in left.read_text()
    assert SECRETS[0] not in str(caught.value) + left.read_text() + caplog.text
    assert SECRETS[0] not in repr(logger) + repr(ConfigContainer(logger=logger))
    assert f"mlflow_tracking_uri='http://***@127.0.0.1:{refusing_port}'" in repr(logger)


def test_callbacks_at_the_end_of_a_process_show_none(caplog):
    watch = _ProcessWatch()
    watch._installed_in = os.getpid()

    def fail(status):
        raise OSError(f"http://me:{SECRETS[0]}@host is away")

    watch.callbacks.append(fail)
    watch._run_callbacks()
    assert "OSError: http://***@host is away" in caplog.text
    assert SECRETS[0] not in caplog.text
