"""Command line: ``python -m layouts [--ranks N ...] [--only NAME ...] [--output FILE]``."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.table import describe_machine
from layouts.combinations import RANKS, STEPS, combinations, name_of
from layouts.comparison import compare, write_text
from layouts.table import markdown

_HEAD = f"""# Every layout of the main job

`hatch run parity` trains {STEPS} steps of a tiny model in every valid combination of the main job's
dimensions, and compares each step's loss, each step's gradient norm and the norm of every
parameter's first gradient with the same model in plain PyTorch, in float64 on one process. The
checkpoint of each is then loaded in other layouts, one on 1, 2, 4 and 8 ranks where there is one,
and two more steps are compared. The columns give the largest relative difference. Up to 1e-5 is
rounding in fp32, up to 6e-2 in bf16; `tools/layouts/table.py` says why.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0 where all is green, else 1."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        data = write_text(Path(folder))
        every = [one for ranks in RANKS for one in combinations(ranks, data)]
        chosen = [
            one
            for one in every
            if one.world_size in options.ranks
            and (not options.only or name_of(one) in options.only)
        ]
        rows = list(compare(chosen[:: options.every], every, Path(folder)))
    machine = "; ".join(f"{label}: {text}" for label, text in describe_machine().items())
    red = sum(not row.is_green for row in rows)
    summary = f"{len(rows) - red} of {len(rows)} combinations are green."
    text = "\n".join(
        [_HEAD, f"{datetime.date.today()}; {machine}. {summary}", "", *markdown(rows), ""]
    )
    print(text)
    if options.output:
        options.output.write_text(text)
    return 1 if red else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m layouts", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="only so many ranks"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these combinations")
    parser.add_argument("--every", type=int, default=1, help="only every n-th combination")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table here as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
