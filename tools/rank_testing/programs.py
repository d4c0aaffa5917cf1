"""Programs of several ranks, started as torchrun would start them but without its waiting time."""

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
    """The exit codes of a program's ranks, and their output in the same two files."""

    exit_codes: list[int]
    stdout: str
    stderr: str


class _ExitError(BaseException):
    """Raised in place of ``os._exit``, which would end a rank before its exit code is read."""


def run_program(
    entry: Entry, arguments: list[str], world_size: int, *, timeout_s: float = 120.0
) -> Ended:
    """Call ``entry(arguments)`` in ``world_size`` ranks as if torchrun had started a program.

    Each rank is forked from a process that has torch loaded. It has torchrun's environment and this
    process's folder, and initialises the process group in its code.

    Args:
        entry: the program's main function, at the top level of a module. It returns its exit code
            or calls ``os._exit`` in its main thread.
        arguments: its command line.
        world_size: the number of ranks.
        timeout_s: time limit in seconds.

    Raises:
        RankFailure: a rank raised, was killed, or exceeded the time limit.

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
        paths = (f"{folder}/stdout", f"{folder}/stderr")
        codes = run_ranks(
            _be_a_rank, world_size, find_target(entry), arguments, paths,
            init=None, env=launcher, timeout_s=timeout_s,
        )  # fmt: skip
        return Ended(codes, *(Path(path).read_text() for path in paths))


def _be_a_rank(target: Target, arguments: list[str], paths: tuple[str, str]) -> int:
    entry = load_target(target)
    for number, path in enumerate(paths, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    warnings.simplefilter("ignore", DeprecationWarning)  # as in a separate program
    warnings.simplefilter("ignore", PendingDeprecationWarning)
    with mock.patch.object(os, "_exit", _raise_exit):
        try:
            code: int = entry(arguments)
            return code
        except _ExitError as left:
            return int(left.args[0])


def _raise_exit(code: int) -> NoReturn:
    raise _ExitError(code)
