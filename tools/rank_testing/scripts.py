"""Python scripts in separate processes that need not import torch: they are forked with it."""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Set
from pathlib import Path

from rank_testing.server import connect_scripts

_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")
_PR_SET_PDEATHSIG = 1
_START_S = 300.0  # the first script waits for the server's imports
_starting = threading.Lock()


class Script:
    """A running script. It is killed when this process ends.

    Attributes:
        pid: the number of its process.
    """

    def __init__(
        self, code: str, *arguments: str, cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self._status, theirs = socket.socketpair()
        request = {
            "code": code,
            "arguments": arguments,
            "cwd": os.path.abspath(cwd or "."),
            "env": dict(os.environ if env is None else env),
        }
        payload = json.dumps(request).encode()
        files = [self._output.fileno(), self._errors.fileno(), theirs.fileno()]
        with _starting, theirs:
            server = connect_scripts()
            socket.send_fds(server, [_LENGTH.pack(len(payload))], files)
            server.sendall(payload)
        self._has_ended = False
        self.pid = self._receive_number(_START_S)

    @property
    def printed(self) -> str:
        """Its standard output so far."""
        return _read_all(self._output.fileno())

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return not self._has_ended and not select.select([self._status], [], [], 0)[0]

    def wait_until_printed(self, text: str, timeout_s: float = 120.0) -> None:
        """Wait until its standard output contains ``text``, or raise TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while text not in self.printed:
            if time.monotonic() > deadline or not self.is_running:
                errors = _read_all(self._errors.fileno())
                raise TimeoutError(f"{text!r} is not in {self.printed!r}. Errors: {errors}")
            time.sleep(0.02)

    def wait(self, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end, once. After the time limit kill it and raise TimeoutExpired."""
        try:
            code = self._receive_number(timeout_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            raise subprocess.TimeoutExpired(
                "script", timeout_s, self.printed, _read_all(self._errors.fileno())
            ) from None
        self._status.close()
        self._has_ended = True
        with self._output, self._errors:
            return subprocess.CompletedProcess(
                "script", code, self.printed, _read_all(self._errors.fileno())
            )

    def send(self, signal_number: int) -> None:
        """Send it a signal, unless ``wait`` has returned."""
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def _receive_number(self, timeout_s: float) -> int:
        self._status.settimeout(timeout_s)
        data = self._status.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(data) < _NUMBER.size:
            raise RuntimeError("the process that starts scripts is gone")
        return int(_NUMBER.unpack(data)[0])


def run_script(
    code: str,
    *arguments: str,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code *arguments`` in a process that has torch loaded already.

    The process ends like any interpreter. Do not use it to test imports: torch and the modules
    named to ``preload`` are in ``sys.modules`` from the start.

    Args:
        code: the script. It finds ``arguments`` after ``sys.argv[0]``.
        *arguments: its command line.
        cwd: its folder, by default the current folder.
        env: all its variables, by default those of this process.
        timeout_s: time limit in seconds. After it the script is killed and
            subprocess.TimeoutExpired is raised.

    Returns:
        Its exit status, negative for a signal, and its output.

    Example:
        >>> run_script("import sys; print(sys.argv[1]); sys.exit(3)", "hello")
        CompletedProcess(args='script', returncode=3, stdout='hello\\n', stderr='')
    """
    return Script(code, *arguments, cwd=cwd, env=env).wait(timeout_s)


def _read_all(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="backslashreplace")


def fork_server(descriptor: int, modules: list[str]) -> str | None:
    """Import modules and fork a process that starts scripts until the test process is gone.

    Returns None in the caller and, in the process of each script, its code.

    Each script has a waiting process between it and the server, which reports its number and its
    exit status: the server itself may be busy with the next request.
    """
    before = set(sys.modules)
    atexit.register(lambda: _keep_modules(loaded))  # first, so it is called last
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    loaded = sys.modules.keys() - before
    # Its parent ends at once: the fork server of the ranks does not wait for other processes.
    if child := os.fork():
        os.close(descriptor)
        os.waitpid(child, 0)
        return None
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.enable()
    gc.freeze()  # else the end of a script collects all of it, which takes longer than the script
    with socket.socket(fileno=descriptor) as requests:
        while True:
            header, files, _, _ = socket.recv_fds(requests, _LENGTH.size, 3)
            if not header:
                os._exit(0)
            (length,) = _LENGTH.unpack(header)
            request = json.loads(requests.recv(length, socket.MSG_WAITALL))
            server = os.getpid()
            if os.fork() == 0:
                break
            for file in files:
                os.close(file)
            with contextlib.suppress(ChildProcessError):  # no waiting process is left
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    *streams, status = files
    _end_with(server)
    waiter, child = os.getpid(), os.fork()
    if child:
        with socket.socket(fileno=status) as answers:
            answers.sendall(_NUMBER.pack(child))
            _, ended = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                answers.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(ended)))
        os._exit(0)
    os.close(status)
    _end_with(waiter)
    for number, file in enumerate(streams, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["arguments"]
    code: str = request["code"]
    return code


def _keep_modules(names: Set[str]) -> None:
    """Exclude the server's modules from the teardown, which takes longer than most scripts."""
    kept = [sys.modules.pop(name, None) for name in names]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _end_with(parent: int) -> None:
    if Path("/proc").is_dir():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
