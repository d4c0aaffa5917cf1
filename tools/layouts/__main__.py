"""Command line: ``python -m layouts``, which runs the combinations and prints their table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.results import read_lines
from bench.table import markdown_line
from layouts.combinations import RANKS, chosen, combinations, name_of
from layouts.comparison import compare, write_text
from layouts.table import Row, page
from pretrain.settings import Settings

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 where all of it that was asked for and has been run is green.

    Else 1, or 2 where nothing was run because of the options.
    """
    options = _parser().parse_args(arguments)
    rows = _read(options.results)
    if rows and not options.resume:
        return _refuse(
            f"{options.results} has {len(rows)} results: --resume goes on with them, --results "
            "names another file"
        )
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        data = write_text(Path(folder))
        every = [one for ranks in RANKS for one in combinations(ranks, data)]
        table = every if options.all else [one for ranks in RANKS for one in chosen(ranks, data)]
        asked = _asked(options, every if options.only else table)
        if unknown := set(options.only or ()) - asked.keys():
            return _refuse(f"there is no {', '.join(sorted(unknown))}")
        left = [
            settings
            for name, settings in asked.items()
            if not (name in rows and rows[name].is_green)
        ]
        interrupted = _run(options, left, every, Path(folder), rows)
    shown = [rows[name] for name in map(name_of, every) if name in rows]
    text = page(shown, len({name_of(one) for one in table} | {row.name for row in shown}))
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    if interrupted:
        return _INTERRUPTED
    return 0 if all(rows[name].is_green for name in asked if name in rows) else 1


def _asked(options: argparse.Namespace, offered: list[Settings]) -> dict[str, Settings]:
    """What is to be run of what is offered, by name."""
    named = {name_of(one): one for one in offered if one.world_size in options.ranks}
    if options.only:
        return {name: one for name, one in named.items() if name in options.only}
    return {name: named[name] for name in part_of(list(named), *options.part)}


def _run(
    options: argparse.Namespace,
    left: list[Settings],
    every: list[Settings],
    folder: Path,
    rows: dict[str, Row],
) -> bool:
    """Run what is left and note it; whether Ctrl-C ended that."""
    options.results.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    try:
        for done, row in enumerate(compare(left, every, folder, deadline), start=1):
            rows[row.name] = row
            _append(options.results, row)
            shown = markdown_line(row.cells())
            print(f"{done} of {len(left)}: {shown}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; --resume goes on behind {options.results}", file=sys.stderr)
        return True
    return False


def _read(results: Path) -> dict[str, Row]:
    """The last row of each combination in a results file; a line that is cut off counts not."""
    lines = read_lines(results, lambda data: Row(**data), lambda why: print(why, file=sys.stderr))
    return {row.name: row for row in lines}


def _append(results: Path, row: Row) -> None:
    """Write a row in a line of its own, even behind one that was cut off."""
    is_cut_off = results.exists() and results.read_bytes()[-1:] not in (b"", b"\n")
    with results.open("a") as file:
        file.write("\n" * is_cut_off + json.dumps(dataclasses.asdict(row)) + "\n")


def _refuse(why: str) -> int:
    print(f"parity: error: {why}", file=sys.stderr)
    return 2


def part(text: str) -> tuple[int, int]:
    """The two numbers of ``3/17``."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is not like 3/17")
    return int(number), int(parts)


def part_of(names: list[str], number: int, parts: int) -> list[str]:
    """One of so many parts of equal size, each with names from everywhere."""
    return names[number % parts :: parts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run parity",
        description="Train the main job in every layout and compare it with one float64 process.",
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="only so many ranks")
    add("--only", nargs="+", metavar="NAME", help="only these combinations, of all that are valid")
    add(
        "--part", type=part, default=(0, 1), metavar="K/N",
        help="only the K-th of N parts, where K counts on from 0 for ever, as nights do",
    )  # fmt: skip
    add("--all", action="store_true", help="every layout with every set of switches: many hours")
    add(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no more after so many; 0 prints the table",
    )
    add(
        "--results", type=Path, default=Path("runs/layouts.jsonl"), metavar="FILE",
        help="where each finished combination is noted (%(default)s)",
    )  # fmt: skip
    add(
        "--resume", action="store_true",
        help="keep the results that are there; run what is missing or was not green",
    )  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="write the table here as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
