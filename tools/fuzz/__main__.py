"""Command line: ``python -m fuzz [TARGET ...] [--seconds S]``. Needs atheris.

Mutates the corpus of each target in a separate process. An error that the reader does not announce,
2 seconds of the CPU, or 200 MB end it with an input in ``build/fuzz``: mend the reader, then keep
the input in ``tools/fuzz/found/TARGET``.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fuzz.corpus import MADE, read_corpus

MOST_SECONDS = 2  # of the CPU: a busy machine makes no input slow
MOST_MB = 200
_MOST_WAIT_S = 120  # by the clock, for a reader that waits for ever


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the targets in turn. Returns 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*MADE, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _fuzz(options.targets[0], options.seconds, options.inside)
    failed = 0
    for name in options.targets or MADE:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            words = ["-m", "fuzz", name, "--seconds", str(options.seconds), "--inside", scratch]
            code = subprocess.run([sys.executable, *words], check=False).returncode
        print(f"fuzz: {name}: {f'failed ({code})' if code else 'in order'}", flush=True)
        failed |= code != 0
    return failed


def _fuzz(name: str, seconds: int, scratch: Path) -> NoReturn:
    import atheris

    with atheris.instrument_imports(include=["mcore", "pretrain"]):
        from fuzz.targets import TARGETS

    found, corpus, folder = Path("build", "fuzz"), scratch / "corpus", scratch / "folder"
    for made in (found, corpus, folder):
        made.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(read_corpus(name, scratch)):
        (corpus / str(number)).write_bytes(content)
    logging.disable()
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + MOST_MB
    limits = [f"-timeout={_MOST_WAIT_S}", f"-rss_limit_mb={most_mb}", "-max_len=1000000"]
    output = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/{name}-", str(corpus)]
    # The fuzzer keeps the input of a process that aborts. A handler in Python would wait until a
    # function in C has ended.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGPROF, ctypes.cast(libc.abort, ctypes.c_void_p))

    def read(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        TARGETS[name](data, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)

    atheris.Setup([sys.argv[0], *limits, *output], read)
    atheris.Fuzz()
    raise SystemExit  # atheris has ended the process


if __name__ == "__main__":
    sys.exit(main())
