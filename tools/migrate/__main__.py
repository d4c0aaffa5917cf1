"""Command line: ``python -m migrate PATH ...``. Rewrites Megatron's imports to mcore's."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from .rewrite import LayoutError, Note, Rewritten, rewrite
from .table import Table, read_table

_SKIPPED = ("__pycache__", "node_modules", "site-packages", "build", "dist")


@dataclass(frozen=True)
class Result:
    """What became of a file that was looked into.

    Attributes:
        path: The file.
        before: Its bytes.
        after: What they are rewritten to; None where it can't be read.
        error: Why it can't be.
    """

    path: Path
    before: bytes
    after: Rewritten | None
    error: str = ""

    @property
    def differs(self) -> bool:
        """Whether anything is rewritten."""
        return self.after is not None and self.after.source != self.before

    @property
    def notes(self) -> list[Note]:
        """What a person has to look at."""
        return [] if self.after is None else self.after.notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite files; return 1 where ``--check`` finds some to rewrite, 2 for what can't be read."""
    parser = _parser()
    options = parser.parse_args(arguments)
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    table = read_table()
    results = [result for file in python_files(options.paths) if (result := read(file, table))]
    if not (options.check or options.diff):
        results = [_written(result) for result in results]
    if options.diff:
        sys.stdout.writelines(line for result in results for line in _diff(result))
    print(
        _as_json(results)
        if options.json
        else "\n".join(_told(results, options.check or options.diff))
    )
    if any(result.error for result in results):
        return 2
    return int(options.check and any(result.differs for result in results))


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files that are named, and the Python files of folders, each once and in order."""
    seen = set()
    for path in paths:
        for file in sorted(_files_of(path)) if path.is_dir() else [path]:
            place = file.resolve()
            if place not in seen:
                seen.add(place)
                yield file


def _files_of(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in _SKIPPED
            and not one.startswith(".")
            and not (Path(root, one) / "pyvenv.cfg").exists()
        ]
        yield from (Path(root, one) for one in files if one.endswith((".py", ".pyi")))


def read(file: Path, table: Table) -> Result | None:
    """Work out the rewriting of a file; None where it does not speak of Megatron."""
    try:
        source = file.read_bytes()
    except OSError as error:
        return Result(file, b"", None, f"can't be read: {error.strerror}")
    if not table.may_concern(source.decode(errors="replace")):
        return None
    try:
        return Result(file, source, rewrite(source, table))
    except LayoutError as error:
        return Result(file, source, None, f"is left: {error}")
    except (cst.ParserSyntaxError, UnicodeError, SyntaxError, RecursionError) as error:
        first = " ".join(str(error).split()[:16])
        return Result(file, source, None, f"is not Python that can be read: {first}")


def _written(result: Result) -> Result:
    """Put the new bytes into the file's place in one step, with its permissions."""
    if result.after is None or not result.differs:
        return result
    place = result.path.resolve()
    try:
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(result.after.source)
            os.chmod(name, stat.S_IMODE(place.stat().st_mode))
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        return Result(result.path, result.before, None, f"can't be written: {error.strerror}")
    return result


def _diff(result: Result) -> Iterator[str]:
    if result.after is None:
        return
    before, after = (
        text.decode(errors="replace").splitlines(keepends=True)
        for text in (result.before, result.after.source)
    )
    name = result.path.as_posix().lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _packages(results: Iterable[Result]) -> list[str]:
    return sorted({one for result in results if result.after for one in result.after.packages})


def _told(results: Sequence[Result], is_dry: bool) -> Iterator[str]:
    for result in results:
        if result.error:
            yield f"{result.path}: {result.error}"
        for note in result.notes:
            left = "left as it is: " if note.is_left else ""
            yield f"{result.path}:{note.line}: {note.name}: {left}{note.text}"
    count = sum(result.differs for result in results)
    yield f"{count} {'file' if count == 1 else 'files'} {'to rewrite' if is_dry else 'rewritten'}"
    packages = _packages(results)
    if packages:
        yield f"pip install {' '.join(packages)}"


def _as_json(results: Sequence[Result]) -> str:
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
    return json.dumps({"files": files, "packages": _packages(results)}, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-migrate",
        description="Rewrite imports of Megatron-LM, Megatron-FSDP and Megatron-Bridge to those of "
        "the mcore packages, in place. Everything else keeps every byte.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files and folders")
    parser.add_argument("--diff", action="store_true", help="print the change, write nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 for work")
    parser.add_argument("--json", action="store_true", help="what was found, for programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
