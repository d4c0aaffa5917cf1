"""What the tests of the training log share: a run of one process, and what it prints."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore.observe
from mcore.observe import (
    ConfigContainer,
    GlobalState,
    LoggerConfig,
    TrainingConfig,
    TrainState,
    training_log,
)
from mcore.observe.sinks.trackers import TRACKERS
from mcore.observe.straggler.exchange import GatheredRows, row_length
from mcore.observe.straggler.outliers import PastReports
from mcore.observe.straggler.report import RankComparison
from rank_testing import free_port, preload
from rank_testing.scripts import Script, run_script
from standin.plugin import accelerator_fixture, device_fixture, on_each_device  # noqa: F401

# The package imports none of its modules before a name needs it. The stand-in stays unregistered.
preload("standin.backend", *sorted({*mcore.observe._MODULE_OF.values()}))

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LINE = re.compile(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\](?P<fields> iteration.*)$", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs(*names): Python modules and programs; what is missing fails on GitHub",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if importlib.util.find_spec(name) is None and shutil.which(name) is None:
                _missing(name)


def _missing(what: str) -> None:
    """Skip a test that cannot run here; where all are to run, fail instead."""
    (pytest.fail if os.environ.get("GITHUB_ACTIONS") else pytest.skip)(f"needs {what}")


@pytest.fixture
def hide_libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hides the metadata of all distributions but this one, and one more if given."""
    find = importlib.metadata.distribution

    def hide(*, but: str = "") -> None:
        def distribution(name):
            if name in ("mcore-observe", but):
                return find("mcore-observe")
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)

    return hide


# What holds after imports in a new interpreter. Each part imports the package anew: without torch,
# with it, all names at once, a name of each module as the first one, and a module by its path.
IMPORTS = """
import gc, json, os, signal, sys, threading
optional, facts = set(json.loads(sys.argv[1])), {}

def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcore"]:
        del sys.modules[name]

def started():
    kept = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return [threading.active_count(), sys.excepthook is sys.__excepthook__, kept]

import mcore.observe
facts["without torch"] = {
    "version": mcore.observe.__version__,
    "dir": dir(mcore.observe),
    "loaded": sorted({"torch", "numpy", *optional} & sys.modules.keys()),
    "started": started(),
}
timers = mcore.observe.Timers
facts["without torch"]["loads torch"] = "torch" in sys.modules
forget()
before = set(sys.modules)
import mcore.observe
facts["with torch"] = {
    "loaded": sorted(optional & sys.modules.keys() - (before & {"pynvml"})),
    "started": started(),
    "initialized": [torch.is_initialized() for torch in (
        sys.modules["torch.distributed"], sys.modules["torch.cuda"]
    )],
    "server": sorted(name for name in sys.modules if ".straggler.server." in name),
    "one detector": mcore.observe.__straggler__ is mcore.observe.StragglerDetector(),
    "configured": mcore.observe.__straggler__.configured,
}
forget()
names = {}
exec("from mcore.observe import *", names)
import mcore.observe
facts["not starred"] = sorted(set(mcore.observe.__all__) - names.keys())
facts["submodule"] = mcore.observe.runs.show.__name__
forget()
import mcore.observe
gc.freeze()
facts["not first"] = []
for name in {module: name for name, module in mcore.observe._MODULE_OF.items()}.values():
    if (child := os.fork()) == 0:
        os._exit(not hasattr(mcore.observe, name))
    if os.waitpid(child, 0)[1]:
        facts["not first"].append(name)
forget()
import mcore.observe.training_log.log
import mcore.observe
from mcore.observe import training_log
facts["function"] = [callable(training_log), mcore.observe.training_log is training_log]
print(json.dumps(facts))
"""


@pytest.fixture(scope="session")
def imports() -> dict[str, Any]:
    """Facts about imports in one new interpreter, for tests of the group "imports"."""
    optional = {spec.module.partition(".")[0] for spec in TRACKERS} - {"torch"}
    optional |= {"tensorboard", "pynvml", "nvtx"}
    assert optional >= {"mlflow", "wandb", "comet_ml"}
    command = [sys.executable, "-c", IMPORTS, json.dumps(sorted(optional))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Chromium or Chrome."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    return found or _missing(f"one of {', '.join(CHROMIUM)}")


def _make_state(*, step=5, sinks=(), train=None, model=None, optimizer=None, **logger):
    config = ConfigContainer(
        logger=LoggerConfig(
            **{"log_interval": 5, "tensorboard_log_interval": 5, "console_format": "megatron"}
            | logger
        ),
        train=train or TrainingConfig(micro_batch_size=2, global_batch_size=64, train_iters=1000),
        model=model,
        optimizer=optimizer,
        data_parallel_size=4,
    )
    train_state = TrainState(step=step, consumed_train_samples=128 * step)
    return GlobalState(config, train_state=train_state, extra_sinks=sinks)


def _log_step(state, losses=None, totals=None, *, lr=1e-4, memory=False, skipped=0, **options):
    arguments = {
        "decoupled_learning_rate": None,
        "loss_scale": 1.0,
        "grad_norm": None,
        "params_norm": None,
        "num_zeros_in_grad": None,
        "history_wct": None,
        "model": None,
    } | options
    return training_log(
        losses if losses is not None else {"lm loss": torch.tensor(2.5)},
        totals if totals is not None else {},
        learning_rate=lr,
        report_memory_flag=memory,
        skipped_iter=skipped,
        config=state.cfg,
        global_state=state,
        **arguments,
    )


# ``mlflow server`` starts uvicorn, or before 3.3 gunicorn, as a program, which would import MLflow
# once more and outlive its parent. Whatever is started nevertheless is in the script's group.
SERVER = """
import os, runpy, subprocess, sys
os.setpgid(0, 0)
from mlflow.cli import cli

def run_here(command, env=None, **options):
    if command[1:3] not in (["-m", "uvicorn"], ["-m", "gunicorn"]):
        return program(command, env=env, **options)
    os.environ.update(env or {})
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    sys.exit()

program, subprocess.Popen = subprocess.Popen, run_here
cli(sys.argv[1:], prog_name="mlflow")
"""


EMPTY = """
import sys
from mlflow.tracking import MlflowClient
MlflowClient(f"sqlite:///{sys.argv[1]}").search_experiments(max_results=1)
"""


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Makes an empty database as a copy of one that MLflow made, and returns its address."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    empty = shared / "empty-mlflow.db"

    def make(path: Path) -> str:
        with open(f"{empty}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not empty.exists():
                quiet = {"MLFLOW_DISABLE_TELEMETRY": "true"}
                done = run_script(EMPTY, f"{empty}.part", env=os.environ | quiet, timeout_s=300)
                assert done.returncode == 0, done.stderr
                os.rename(f"{empty}.part", empty)
        shutil.copyfile(empty, path)
        return f"sqlite:///{path}"

    return make


class Server:
    """``mlflow server`` with one worker and a database of its own."""

    def __init__(self, folder, database):
        self.folder, self.database = folder, database
        self.port = free_port()
        self.script = None

    def start(self):
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
            "--backend-store-uri": self.database,
            "--default-artifact-root": str(self.folder / "artifacts"),
        }
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        arguments = ["server", *(word for option in options.items() for word in option)]
        self.script = Script(SERVER, *arguments, env=os.environ | quiet)
        self._wait()

    def _wait(self):
        """Until it answers a call: the first one takes it long, and no client may wait for that."""
        address = f"http://127.0.0.1:{self.port}/api/2.0/mlflow/experiments/search?max_results=1"
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.script.is_running:
            try:
                urllib.request.urlopen(address, timeout=120).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
            else:
                return
        pytest.fail(str(self.kill()))

    def stop(self):
        """Stop it as a machine that hangs: connections stay open, and nothing is answered."""
        os.killpg(self.script.pid, signal.SIGSTOP)

    def kill(self):
        """Kill it with all that it started; return how it ended."""
        script, self.script = self.script, None
        if script is None:
            return None
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(script.pid, signal.SIGKILL)
        script.send(signal.SIGKILL)
        return script.wait()


@pytest.fixture(scope="session")
def tracking_server(
    mlflow_database: Callable[[Path], str],
) -> Iterator[Callable[[Path], Server]]:
    """Makes a server in a folder, which is started and killed by hand, and at the end anyway."""
    with contextlib.ExitStack() as made:

        def make(folder: Path) -> Server:
            server = Server(folder, mlflow_database(folder / "mlflow.db"))
            made.callback(server.kill)
            return server

        yield make


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a folder keep what trackers have not taken in the current one."""
    monkeypatch.chdir(tmp_path)


def _offline(folder, *, quiet=True):
    nowhere = "http://127.0.0.1:9"
    places = ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "MPLCONFIGDIR")
    settings = dict.fromkeys(places, str(folder)) | {
        "WANDB_MODE": "offline",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_X_DISABLE_META": "true",
        "COMET_API_KEY": None,
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_AUTO_LOG_ENV_DETAILS": "0",
        "COMET_INTERNAL_SENTRY_DSN": "",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    if quiet:
        settings["WANDB_SILENT"] = "true"
        settings |= {"COMET_LOGGING_CONSOLE": "ERROR", "COMET_DISPLAY_SUMMARY_LEVEL": "0"}
    return settings


@pytest.fixture(scope="session")
def offline() -> Callable[..., dict[str, str | None]]:
    """Variables that keep the clients offline, in a folder, and away from their makers."""
    return _offline


def _wandb_records(path, header=7, block=32768):
    """Yield the records, in the format of LevelDB's log; SIGKILL cuts the last one off."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = header, b""
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + header : at + header + size]
        at += header + size
        if at > len(data):
            return
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture(scope="session")
def wandb_records() -> Callable[[Path], Iterator[Any]]:
    """Reads the file of a W&B run that was written offline."""
    return _wandb_records


@pytest.fixture(scope="session")
def make_state() -> Callable[..., GlobalState]:
    """Makes the state of a run that logs every fifth step, with a batch of 64."""
    return _make_state


@pytest.fixture(scope="session")
def log_step() -> Callable[..., bool]:
    """Calls the training log for the present step of a state, with a loss of 2.5."""
    return _log_step


class SimulatedJob:
    """Ranks whose reports have the numbers given, eight ranks a host; no communication."""

    def __init__(self, world: int, sections: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        self.world, self.names = world, ("compute", "data", *sections)
        self.hosts = tuple(hosts) or tuple(f"node{rank // 8:03}" for rank in range(world))
        self.past = PastReports(self.names)

    def report(
        self, metrics: torch.Tensor, sums_ms: torch.Tensor | None = None, unix_time: float = 0.0
    ) -> RankComparison:
        """What rank 0 finds: ``metrics`` is ``[7, world]``, ``sums_ms`` ``[sections, world]``."""
        rows = torch.zeros(self.world, row_length(len(self.names)), dtype=torch.float64)
        rows[:, :5] = torch.tensor([1.0, 7.0, 1.0, 1.0, 0.0])
        rows[:, 5:12] = metrics.t()
        rows[:, 12] = 10  # iterations
        rows[:, 16::4] = 10
        rows[:, 17::4] = torch.nan
        if sums_ms is not None:
            rows[:, 17::4] = sums_ms.t()
        rows[:, 18::4] = rows[:, 17::4] / 10
        return RankComparison(
            GatheredRows(rows, tuple(range(self.world))),
            unix_time=unix_time,
            hosts=self.hosts,
            devices=tuple(f"cuda:{rank % 8}" for rank in range(self.world)),
            names=self.names,
            past=self.past,
        )


@pytest.fixture(scope="session")
def simulated_job() -> type[SimulatedJob]:
    """Makes a job of ranks whose reports are made up."""
    return SimulatedJob


def _compared(report: Any, unix_time: float | None = None) -> SimpleNamespace:
    world = getattr(report, "world_size", 1)
    return SimpleNamespace(
        report=report,
        to_prometheus=lambda **options: report.to_prometheus(**options),
        unix_time=report.unix_time if unix_time is None else unix_time,
        by_rank=lambda: torch.zeros(7, world),
        places=[("h", "cpu")] * world,
        section_names=(),
        stragglers=(),
        is_measuring=False,
    )


@pytest.fixture(scope="session")
def compared() -> Callable[..., SimpleNamespace]:
    """Makes what a detector hands over with a report."""
    return _compared


@pytest.fixture
def printed_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Returns the fields of the one console line that was printed since the last call."""

    def read() -> str:
        text = capsys.readouterr().out
        found = LINE.findall(text)
        assert len(found) == 1, text
        return found[0]

    return read


@pytest.fixture
def world_of_eight() -> Iterator[None]:
    """Makes this process the last of eight ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def wait_for_helpers() -> Callable[[str], None]:
    """Wait until no process is left that was started with a variable; W&B's write to their end."""

    def wait(variable: str) -> None:
        deadline = time.monotonic() + 240
        while left := [pid for pid in os.listdir("/proc") if variable in _variables_of(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    return wait


def _variables_of(pid: str) -> Sequence[str]:
    try:
        return Path("/proc", pid, "environ").read_text(errors="replace").split("\0")
    except OSError:
        return ()
