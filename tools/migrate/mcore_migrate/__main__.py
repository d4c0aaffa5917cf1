"""Command line: ``python -m mcore_migrate PATH ...``. Rewrites Megatron's imports to mcore's."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from .differences import CHECKPOINT_NAMES
from .files import Result, look_at, python_files, read, written
from .table import Home, read_table

# With at least this many files, several processes read them.
_MANY = 32
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # the status of a program that SIGPIPE ends
T = TypeVar("T")


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
    found = _Found()
    try:
        read_results = _read_files([*python_files(options.paths)], found)
        if options.check or options.diff:
            found.results = read_results
        else:
            for result in read_results:
                with _hold_interrupts():  # else its notes could be lost
                    found.results.append(written(result))
    except KeyboardInterrupt:
        if found.results:
            _print(found, options)
        print(
            f"interrupted after {found.count} rewritten files. The others are as before",
            file=sys.stderr,
        )
        return _INTERRUPTED
    _print(found, options)
    if any(result.error for result in found.results):
        return 2
    return int(options.check and found.count > 0)


@dataclass
class _Found:
    """The results of all files, and facts about the tree.

    Attributes:
        results: The files with something to rewrite or to note.
        stays: Names that files import from the old modules, and that no package has.
        held: Names that stay with Megatron because of the import in ``saver``.
        saver: The first file that imports Megatron's checkpoints or its data parallelism.
        relative: The relative imports that are left.
    """

    results: list[Result] = field(default_factory=list)
    stays: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)
    saver: Path | None = None
    relative: int = 0

    @property
    def count(self) -> int:
        """The number of files that are rewritten."""
        return sum(result.differs for result in self.results)

    @property
    def moved(self) -> set[Home]:
        """The new places of the names that move."""
        return set().union(*(result.after.moved for result in self.results if result.after))

    @property
    def packages(self) -> list[str]:
        """The packages that the files need."""
        return sorted({home.package for home in self.moved})


def _read_files(files: Sequence[Path], found: _Found) -> list[Result]:
    """The rewritten sources of the files, made by several processes if there are many."""
    table = read_table()
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor()) if len(files) >= _MANY else None
        looks = _map(pool, partial(look_at, table=table), files)
        savers = (file for file, look in zip(files, looks, strict=True) if look.saves)
        found.saver = None if any(look.converts for look in looks) else next(savers, None)
        table = table.hold(CHECKPOINT_NAMES if found.saver else ())
        found.held = sorted(table.held & set().union(*(look.names for look in looks)))
        found.stays.update(*(look.stays for look in looks))
        found.relative = sum(look.relative for look in looks)
        chosen = [file for file, look in zip(files, looks, strict=True) if look.has_work(table)]
        results = _map(pool, partial(read, table=table), chosen)
    found.stays.update(*(one.after.stays for one in results if one and one.after))
    return [result for result in results if result]


def _map(
    pool: ProcessPoolExecutor | None, function: Callable[[Path], T], files: Sequence[Path]
) -> list[T]:
    """The results of a function for all files. For many files, with a bar on a terminal."""
    results = []
    try:
        with _hold_interrupts():  # forever in the processes that start here
            found = pool.map(function, files, chunksize=4) if pool else map(function, files)
        for number, result in enumerate(found, 1):
            results.append(result)
            if pool and sys.stderr.isatty():
                bar = f"\r[{'#' * (30 * number // len(files)):<30}] {number} of {len(files)} files"
                print(bar, end="\n" * (number == len(files)), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if pool:
            pool.shutdown(cancel_futures=True)
        raise
    return results


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _print(found: _Found, options: argparse.Namespace) -> None:
    """Print the results. A diff is alone on the standard output, for ``patch``."""
    if options.diff:
        sys.stdout.flush()
        for result in found.results:
            sys.stdout.buffer.writelines(_make_diff(result))
        sys.stdout.buffer.flush()
    if options.json:
        print(_format_json(found))
    else:
        print("\n".join(_describe(found, options)), file=sys.stderr if options.diff else sys.stdout)


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


def _describe(found: _Found, options: argparse.Namespace) -> Iterator[str]:
    for result in found.results:
        if result.error:
            yield f"{result.path}: {result.error}"
        for note in result.notes:
            left = "left as it is: " if note.is_left else ""
            yield f"{result.path}:{note.line}: {note.name}: {left}{note.text}"
    done = "to rewrite" if options.check or options.diff else "rewritten"
    yield f"{found.count} {'file' if found.count == 1 else 'files'} {done}"
    if found.moved:
        yield f"moves: {', '.join(sorted({home.name for home in found.moved}))}"
    if found.held:
        yield (
            f"left with Megatron, whose checkpoints or data parallelism {found.saver} imports: "
            f"{', '.join(found.held)}. To move them too, convert the sharded state dicts with "
            "mcore.modules.to_megatron_sharded_state_dict, then run this once more"
        )
    if found.relative:
        yield (
            f"{found.relative} relative imports left: no folder megatron/core, megatron/bridge or "
            "megatron_fsdp is above them"
        )
    if found.stays:
        yield f"stays with Megatron, in no package: {', '.join(sorted(found.stays))}"
    if packages := found.packages:
        yield f"pip install {' '.join(packages)}"


def _format_json(found: _Found) -> str:
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
        for result in found.results
        if result.differs or result.error or result.notes
    ]
    report = {
        "files": files,
        "packages": found.packages,
        "stays": sorted(found.stays),
        "held": found.held,
        "relative": found.relative,
    }
    return json.dumps(report, indent=2)


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
    output.add_argument("--json", action="store_true", help="print JSON. Writes without --check")
    return parser


if __name__ == "__main__":
    sys.exit(main())
