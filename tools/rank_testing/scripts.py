"""Python scripts in processes of their own that need not import torch: they are forked with it."""

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
from collections.abc import Mapping
from pathlib import Path

from rank_testing.server import modules_for_scripts, server_environment, variables_of_the_test

_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")
_PR_SET_PDEATHSIG = 1
_START_S = 300.0  # the first script waits for the server's imports
# The script is executed at the top level of the server's own script, so that its process ends like
# that of any interpreter: with sys.excepthook, atexit and everything that is torn down after them.
_SERVER = (
    "import sys; from rank_testing.scripts import next_script; "
    "exec(next_script(int(sys.argv[1]), sys.argv[2:]))"
)

_starting = threading.Lock()
# The process that it serves, the socket to it, and itself.
_server: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None


class Script:
    """A script that runs; it is killed when this process ends.

    Attributes:
        pid: the number of its process.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._stdout, self._stderr = _unnamed_file(), _unnamed_file()
        self._status, theirs = socket.socketpair()
        request = {
            "code": code,
            "arguments": arguments,
            "cwd": os.path.abspath(cwd or "."),
            "env": variables_of_the_test() if env is None else dict(env),
        }
        payload = json.dumps(request).encode()
        files = [self._stdout, self._stderr, theirs.fileno()]
        with _starting, theirs:
            server = _running_server()
            socket.send_fds(server, [_LENGTH.pack(len(payload))], files)
            server.sendall(payload)
        self._has_ended = False
        self.pid = self._number(_START_S)

    @property
    def printed(self) -> str:
        """What it has printed to its standard output by now."""
        return _content(self._stdout)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self._has_ended:
            return False
        ready, _, _ = select.select([self._status], [], [], 0)
        return not ready

    def wait_until_printed(self, text: str, timeout_s: float = 120.0) -> None:
        """Wait until its standard output contains a text; TimeoutError where it does not come."""
        deadline = time.monotonic() + timeout_s
        while text not in self.printed:
            if time.monotonic() > deadline or not self.is_running:
                raise TimeoutError(f"{text!r} is not in {self.printed!r}; {_content(self._stderr)}")
            time.sleep(0.02)

    def wait(self, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end, once; where it does not come, kill it and raise TimeoutExpired."""
        try:
            code = self._number(timeout_s)
        except TimeoutError:
            self.send(signal.SIGKILL)
            raise subprocess.TimeoutExpired(
                "script", timeout_s, self.printed, _content(self._stderr)
            ) from None
        self._status.close()
        self._has_ended = True
        printed = self.printed, _content(self._stderr)
        for file in (self._stdout, self._stderr):
            os.close(file)
        return subprocess.CompletedProcess("script", code, *printed)

    def send(self, signal_number: int) -> None:
        """Send it a signal, unless its end was waited for."""
        if not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def _number(self, timeout_s: float) -> int:
        self._status.settimeout(timeout_s)
        data = self._status.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(data) < _NUMBER.size:
            raise RuntimeError("the process that starts scripts is gone")
        (number,) = _NUMBER.unpack(data)
        return int(number)


def run_script(
    code: str,
    *arguments: str,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Do what ``python -c code *arguments`` does, in a process that has torch loaded already.

    The process ends like any interpreter. Not for what an import does or loads: torch and what
    ``preload`` named are in its ``sys.modules`` from the start.

    Args:
        code: the script, which finds ``arguments`` behind ``sys.argv[0]``.
        *arguments: its command line.
        cwd: its folder, by default the present one.
        env: all its variables, by default those of this process.
        timeout_s: seconds that it has; then it is killed and subprocess.TimeoutExpired is raised.

    Returns:
        Its exit status, negative for a signal, and what it printed.

    Example:
        >>> run_script("import sys; print(sys.argv[1]); sys.exit(3)", "hello")
        CompletedProcess(args='script', returncode=3, stdout='hello\\n', stderr='')
    """
    return Script(code, *arguments, cwd=cwd, env=env).wait(timeout_s)


def _unnamed_file() -> int:
    descriptor, path = tempfile.mkstemp(prefix="rank_testing-")
    os.unlink(path)
    return descriptor


def _content(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="backslashreplace")


def _running_server() -> socket.socket:
    global _server
    if _server is None or _server[0] != os.getpid():
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno()), *modules_for_scripts()],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**variables_of_the_test(), **server_environment()},
                start_new_session=True,
            )
        _server = os.getpid(), ours, process
    return _server[1]


def next_script(descriptor: int, modules: list[str]) -> str:
    """Serve requests until the test process is gone; return the code in each script's process."""
    for name in modules:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # an end need not look at all of it, which takes longer than the script
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
            _reap()
    stdout, stderr, status = files
    _end_with(server)
    _fork_and_tell(socket.socket(fileno=status))
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["arguments"]
    code: str = request["code"]
    return code


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_and_tell(status: socket.socket) -> None:
    """Return in a child; this process tells its number and its exit status, and is gone."""
    waiter, child = os.getpid(), os.fork()
    if child == 0:
        status.close()
        _end_with(waiter)
        return
    status.sendall(_NUMBER.pack(child))
    _, ended = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        status.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(ended)))
    os._exit(0)


def _end_with(parent: int) -> None:
    if Path("/proc").is_dir():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which ended before
        os._exit(1)
