"""Command line: ``python -m scale [--items ITEM ...] [--ranks N ...] [--record [FILE]]``."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path

from results import RECORDS
from results.machine import describe_machine, timestamp
from results.page import text_table
from scale.items import ITEMS
from scale.meter import measure
from scale.processes import REAL, REAL_SIZES
from scale.record import Result, keep, read_results, table

SIZES = (1024, 4096, 16384, 65536, 131072)
STEP = 1024  # every item divides its ranks
RESULTS = RECORDS / "scale.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure costs that grow with the number of ranks, and print a table of each."""
    parser = argparse.ArgumentParser(prog="hatch run scale", description=main.__doc__)
    add = parser.add_argument
    add("--items", nargs="+", choices=ITEMS, default=[*ITEMS], help="default: all")
    add("--ranks", nargs="+", type=int, default=SIZES, metavar="1024N", help="default: %(default)s")
    add("--record", nargs="?", type=Path, const=RESULTS, metavar="FILE",
        help="keep the results and write a page (default: those of the repository)")  # fmt: skip
    options = parser.parse_args(arguments)
    if wrong := [ranks for ranks in options.ranks if ranks < 1 or ranks % STEP]:
        parser.error(f"--ranks {wrong[0]} is not a multiple of {STEP}")
    if options.record:
        read_results(options.record)  # a damaged journal ends the run here
    for name in options.items:
        text = inspect.cleandoc(ITEMS[name].__doc__ or name)
        facts = timestamp(), describe_machine()
        sizes = REAL_SIZES if name == REAL else sorted(options.ranks)
        result = Result(name, text, *facts, measure(ITEMS[name], sizes, forks=name != REAL))
        print(f"\n{name}: {text}\n{text_table(*table(result))}", flush=True)
        if options.record:
            keep(options.record, result)


if __name__ == "__main__":
    main()
