"""Ranks forked from their launcher, which has torch loaded: a new Python imports it in seconds.

A rank gets the words, variables, signals and files of a new program, in a session of its own.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Variables of a rank that tests read. Others may hold a password.
_KEPT = ("RANK", "TORCHELASTIC_RUN_ID", "PRETRAIN_PRIVATE_FOLDER")


def fork_ranks(begin: str = "", seen: Path | None = None) -> None:
    """Let torch's launcher in this process fork each ``python -m MODULE``.

    Args:
        begin: code that a rank executes first.
        seen: a file, to which the launcher adds a line about each rank.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    import pretrain.rank  # noqa: F401  # for all ranks at once

    vars(subprocess_handler)["Popen"] = functools.partial(_fork, begin, seen)


def _fork(
    begin: str, seen: Path | None, args: Sequence[str], env: dict[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    rank = subprocess.Popen(
        args, env=env, preexec_fn=functools.partial(_be_a_rank, begin, args, env), **options
    )
    if seen is not None:
        kept = {name: env[name] for name in _KEPT if name in env}
        with seen.open("a") as file:
            file.write(json.dumps({"pid": rank.pid, "words": list(args), "env": kept}) + "\n")
    return rank


def _be_a_rank(begin: str, words: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Be what ``python -m MODULE`` is after its start, in place of an ``exec``."""
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        gc.enable()  # which Popen has switched off
        os.environ.clear()
        os.environ.update(env)
        exec(begin, {})
        place = words.index("-m")
        sys.argv = list(words[place:][:1]) + list(words[place + 2 :])
        runpy.run_module(words[place + 1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # the launcher's exit hooks are not the rank's
