"""Programs of several ranks that a launcher such as torchrun would start, without its waiting."""

import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest import mock

from rank_testing.launch import run_ranks
from rank_testing.ports import free_port
from rank_testing.target import Target, find_target, load_target

Entry = Callable[[list[str]], int]


@dataclass(frozen=True)
class Ended:
    """How the ranks of a program ended, and what they printed into the same two files."""

    exit_codes: list[int]
    stdout: str
    stderr: str


class _Left(BaseException):
    """Raised in place of ``os._exit``, which would end a rank before its exit code is known."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run_program(
    entry: Entry, arguments: list[str], world_size: int, *, timeout_s: float = 120.0
) -> Ended:
    """Call ``entry(arguments)`` in ``world_size`` ranks as if torchrun had started a program.

    Each rank is forked from a process that has torch loaded. It has the environment that torchrun
    gives, in this process's folder, and joins the process group by itself.

    Args:
        entry: the program's main function, at the top level of a module, which returns its exit
            code or calls ``os._exit`` in its main thread.
        arguments: its command line.
        world_size: the number of ranks.
        timeout_s: seconds that the ranks have.

    Raises:
        RankFailure: a rank raised, was killed, or has not ended in time.

    Example:
        >>> run_program(len, ["--option", "value"], 2).exit_codes
        [2, 2]
    """
    __tracebackhide__ = True
    launcher = {
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with tempfile.TemporaryDirectory(prefix="rank_testing-") as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        paths = (str(output), str(errors))
        codes = run_ranks(
            _be_a_rank, world_size, find_target(entry), arguments, paths,
            init=None, env=launcher, timeout_s=timeout_s,
        )  # fmt: skip
        return Ended(codes, output.read_text(), errors.read_text())


def _be_a_rank(target: Target, arguments: list[str], paths: tuple[str, str]) -> int:
    entry = load_target(target)
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    warnings.simplefilter("ignore", DeprecationWarning)  # as in a program of its own
    warnings.simplefilter("ignore", PendingDeprecationWarning)
    with mock.patch.object(os, "_exit", _leave):
        try:
            code: int = entry(arguments)
            return code
        except _Left as left:
            return left.code


def _leave(code: int) -> NoReturn:
    raise _Left(code)
