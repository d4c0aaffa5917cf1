"""Command line: ``python -m layouts``, which runs the combinations and prints the summary."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from layouts.combinations import RANKS, choose_combinations, combinations, held_out, name_of
from layouts.comparison import compare, write_text
from layouts.table import Row, page
from pretrain.settings import Settings
from results.journal import append_line, read_journal, write_whole
from results.page import markdown_line

_INTERRUPTED = 130  # as shells report SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary.

    Returns 0 if each requested combination that has been run is green, else 1. Returns 2 if the
    options are refused.
    """
    options = _build_parser().parse_args(arguments)
    # A cut-off line is left out: its combination runs again.
    journal = read_journal(options.results, lambda data: Row(**data), _warn)
    rows = {row.name: row for row in journal}
    if rows and not options.resume:
        _warn(
            f"error: {options.results} has {len(rows)} results. Continue them with --resume, or "
            "name another file with --results"
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        data = write_text(Path(folder))
        every = [one for ranks in RANKS for one in combinations(ranks, data)]
        chosen = [one for ranks in RANKS for one in choose_combinations(ranks, data)]
        more = held_out(data)
        table = [*(every if options.all else chosen), *more]
        requested = _select(options, [*every, *more] if options.only else table)
        if unknown := set(options.only or ()) - requested.keys():
            _warn(f"error: there is no {', '.join(sorted(unknown))}")
            return 2
        left = [
            settings
            for name, settings in requested.items()
            if not (name in rows and rows[name].is_green)
        ]
        interrupted = _run(options, left, every, Path(folder), rows)
    names = dict.fromkeys(map(name_of, [*every, *more]))
    done = [rows[name] for name in names if name in rows]
    text = page(done, len({name_of(one) for one in table} | {row.name for row in done}))
    print(text, end="")
    if options.output:
        write_whole(options.output, text)
    if interrupted:
        return _INTERRUPTED
    return 0 if all(rows[name].is_green for name in requested if name in rows) else 1


def _select(options: argparse.Namespace, offered: list[Settings]) -> dict[str, Settings]:
    """The requested combinations by name."""
    named = {name_of(one): one for one in offered if one.world_size in options.ranks}
    if options.only:
        return {name: one for name, one in named.items() if name in options.only}
    return {name: named[name] for name in select_part(list(named), *options.part)}


def _run(
    options: argparse.Namespace, left: list[Settings], every: list[Settings], folder: Path,
    rows: dict[str, Row],
) -> bool:  # fmt: skip
    """Run combinations and record each. Returns whether Ctrl-C ended that."""
    deadline = time.monotonic() + 60 * options.minutes
    try:
        for done, row in enumerate(compare(left, every, folder, deadline), start=1):
            rows[row.name] = row
            append_line(options.results, dataclasses.asdict(row))
            _warn(f"{done} of {len(left)}: {markdown_line(row.cells())}")
    except KeyboardInterrupt:
        _warn(f"interrupted. --resume continues {options.results}")
        return True
    return False


def _warn(message: str) -> None:
    print(f"parity: {message}", file=sys.stderr, flush=True)


def parse_part(text: str) -> tuple[int, int]:
    """The two numbers of ``3/17``."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is not like 3/17")
    return int(number), int(parts)


def select_part(names: list[str], number: int, parts: int) -> list[str]:
    """Every N-th name: each part has combinations of all kinds."""
    return names[number % parts :: parts]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run parity",
        description="Train the main job in every layout and compare it with one float64 process.",
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="only on N ranks")
    add("--only", nargs="+", metavar="NAME", help="only these combinations, of all that are valid")
    add(
        "--part", type=parse_part, default=(0, 1), metavar="K/N",
        help="only part K of N. K may exceed N (taken modulo N)",
    )  # fmt: skip
    add("--all", action="store_true", help="every layout with every set of switches: many hours")
    add(
        "--minutes", type=float, default=math.inf,
        help="stop starting combinations after this time. 0 with --resume only prints the summary",
    )  # fmt: skip
    add(
        "--results", type=Path, default=Path("runs/layouts.jsonl"), metavar="FILE",
        help="record each finished combination here (%(default)s)",
    )  # fmt: skip
    add("--resume", action="store_true", help="keep the recorded results, run the rest")
    add("--output", type=Path, metavar="FILE", help="also write the summary here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
