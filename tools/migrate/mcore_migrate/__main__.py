"""Command line: ``python -m mcore_migrate PATH ...``. Rewrites Megatron's imports to mcore's."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from .files import Result, python_files, read, written
from .table import read_table

# With at least this many files, several processes read them.
_MANY = 32
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite files. Returns 1 if ``--check`` finds work, 2 if a file cannot be read or written."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.paths if not os.path.lexists(path)]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # else Python would flush the rest at its end, and fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:  # while printing
        return _INTERRUPTED
    return code


def _run(options: argparse.Namespace) -> int:
    results: list[Result] = []
    try:
        found = _read_files([*python_files(options.paths)])
        if options.check or options.diff:
            results = found
        else:
            for result in found:
                with _hold_interrupts():  # else its notes could be lost
                    results.append(written(result))
    except KeyboardInterrupt:
        if results:
            _print(results, options)
        count = sum(result.differs for result in results)
        print(
            f"interrupted after {count} rewritten files; the others are as before", file=sys.stderr
        )
        return _INTERRUPTED
    _print(results, options)
    if any(result.error for result in results):
        return 2
    return int(options.check and any(result.differs for result in results))


def _read_files(files: Sequence[Path]) -> list[Result]:
    """The rewritten sources of the files, made by several processes if there are many."""
    look = partial(read, table=read_table())
    if len(files) < _MANY:
        return [result for result in map(look, files) if result]
    with ProcessPoolExecutor() as pool:
        try:
            with _hold_interrupts():  # forever in the processes that start here
                found = pool.map(look, files, chunksize=4)
            return [result for result in found if result]
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _print(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print the results. A diff is alone on the standard output, for ``patch``."""
    is_dry = options.check or options.diff
    if options.diff:
        sys.stdout.flush()
        for result in results:
            sys.stdout.buffer.writelines(_make_diff(result))
        sys.stdout.buffer.flush()
    if options.json:
        print(_format_json(results))
    else:
        print(
            "\n".join(_describe(results, is_dry)), file=sys.stderr if options.diff else sys.stdout
        )


def _make_diff(result: Result) -> Iterator[bytes]:
    if result.after is None:
        return
    before, after = map(_split_lines, (result.before, result.after.source))
    name = os.fsencode(result.path.as_posix().lstrip("/"))
    for line in difflib.diff_bytes(difflib.unified_diff, before, after, b"a/" + name, b"b/" + name):
        yield line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _split_lines(text: bytes) -> list[bytes]:
    """Lines as ``patch`` reads them: only a line feed ends one."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def _list_packages(results: Iterable[Result]) -> list[str]:
    return sorted({one for result in results if result.after for one in result.after.packages})


def _list_stays(results: Iterable[Result]) -> list[str]:
    return sorted({one for result in results if result.after for one in result.after.stays})


def _describe(results: Sequence[Result], is_dry: bool) -> Iterator[str]:
    for result in results:
        if result.error:
            yield f"{result.path}: {result.error}"
        for note in result.notes:
            left = "left as it is: " if note.is_left else ""
            yield f"{result.path}:{note.line}: {note.name}: {left}{note.text}"
    count = sum(result.differs for result in results)
    yield f"{count} {'file' if count == 1 else 'files'} {'to rewrite' if is_dry else 'rewritten'}"
    stays = _list_stays(results)
    if stays:
        yield f"stays with Megatron, in no package: {', '.join(stays)}"
    packages = _list_packages(results)
    if packages:
        yield f"pip install {' '.join(packages)}"


def _format_json(results: Sequence[Result]) -> str:
    files = [
        {
            "path": str(result.path),
            "rewritten": result.differs,
            "error": result.error or None,
            "notes": [
                {"line": one.line, "name": one.name, "text": one.text, "left": one.is_left}
                for one in result.notes
            ],
        }
        for result in results
        if result.differs or result.error or result.notes
    ]
    found = {"files": files, "packages": _list_packages(results), "stays": _list_stays(results)}
    return json.dumps(found, indent=2)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-migrate",
        description="Rewrite imports of Megatron-LM, Megatron-FSDP and Megatron-Bridge to imports "
        "of the mcore packages, in place. All other bytes stay.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files and folders")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file needs rewriting"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--diff", action="store_true", help="print the change, write nothing")
    output.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
