"""A real MLflow server, which faults kill and the campaign starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from rank_testing.ports import free_port

_START_S = 180.0


class Tracker:
    """``mlflow server`` with a new database, always at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"http://127.0.0.1:{free_port()}"
        self.restarts = threading.Event()
        self._ends = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def is_up(self) -> bool:
        """Whether it responds."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):
            return True
        return False

    def ensure(self) -> int:
        """Start it unless it runs, and wait for a response. Returns its process group."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
        deadline = time.monotonic() + _START_S
        while not self.is_up:
            if time.monotonic() > deadline:
                raise TimeoutError(f"MLflow's server does not respond at {self.uri}")
            time.sleep(0.2)
        return process.pid

    def close(self) -> None:
        """Kill it and stop restarting it."""
        self._ends.set()
        with self._starting, contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        options = {
            "--host": "127.0.0.1", "--port": self.uri.rpartition(":")[2], "--workers": "1",
            "--backend-store-uri": f"sqlite:///{self.folder}/server.db",
            "--default-artifact-root": str(self.folder / "artifacts"),
        }  # fmt: skip
        words = [word for option in options.items() for word in option]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words], env={**os.environ, **quiet},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _watch(self) -> None:
        """Restart it after a kill, in trials with ``restarts`` set."""
        while not self._ends.wait(0.2):
            if self.restarts.is_set() and self._process is not None:
                with self._starting:
                    if self._process.poll() is not None and not self._ends.is_set():
                        self._process = self._start()
