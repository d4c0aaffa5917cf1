"""Command line: ``python -m layouts``, which runs the combinations and prints their table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from layouts.combinations import RANKS, chosen, combinations, name_of
from layouts.comparison import compare, write_text
from layouts.table import Row, page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 where every combination asked for is green, else 1."""
    options = _parser().parse_args(arguments)
    rows = {row.name: row for row in _read(options.results)} if options.resume else {}
    _write(options.results, rows.values())
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        data = write_text(Path(folder))
        every = [one for ranks in RANKS for one in combinations(ranks, data)]
        offered = [one for ranks in RANKS for one in chosen(ranks, data)]
        if options.all or options.only:
            offered = every
        asked = [
            one
            for one in offered
            if one.world_size in options.ranks
            and (not options.only or name_of(one) in options.only)
        ][:: options.every]
        if unknown := set(options.only or ()) - {name_of(one) for one in asked}:
            print(f"no such combination: {', '.join(sorted(unknown))}", file=sys.stderr)
            return 2
        names = [name_of(one) for one in asked]
        green = {name for name, row in rows.items() if row.is_green}
        left = [one for one in asked if name_of(one) not in green]
        for row in compare(left, every, Path(folder)):
            rows[row.name] = row
            _append(options.results, row)
            done = sum(name in rows for name in names)
            print(f"{done} of {len(names)}: {row.line()}", file=sys.stderr, flush=True)
    known = sorted(rows.values(), key=lambda row: (row.ranks, row.name))
    text = page(known, len(offered))
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if all(rows[name].is_green for name in names) else 1


def _read(results: Path) -> list[Row]:
    """The rows of a results file; a last line that was cut off counts for nothing."""
    rows = []
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except ValueError:
            print(f"{results}: left out a broken line", file=sys.stderr)
    return rows


def _write(results: Path, rows: Iterable[Row]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("".join(_as_line(row) for row in rows))


def _append(results: Path, row: Row) -> None:
    with results.open("a") as file:
        file.write(_as_line(row))


def _as_line(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row)) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hatch run parity",
        description="Train the main job in every layout and compare it with one float64 process.",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="only so many ranks"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these combinations")
    parser.add_argument("--every", type=int, default=1, help="only every n-th combination")
    parser.add_argument(
        "--all", action="store_true", help="every layout with every set of switches: hours"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("runs/layouts.jsonl"), metavar="FILE",
        help="where each finished combination is noted (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="keep the results that are there, and run those that are missing or were not green",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table here as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
