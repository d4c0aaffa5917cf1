"""Command line: ``python -m mcore_megatron [options] SCRIPT ...``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import mcore_megatron
from mcore_migrate.serving import format_report


def main() -> None:
    """Run a script as ``python SCRIPT ...`` does, with mcore's names in Megatron's modules."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_megatron",
        description="Run a script with mcore's names in Megatron's modules.",
    )
    parser.add_argument(
        "--only", metavar="NAME,...", help="names to serve, also those that are left otherwise"
    )
    parser.add_argument("--except", dest="exclude", metavar="NAME,...", help="names to leave")
    parser.add_argument(
        "--report", action="store_true", help="list the names that are Megatron's, at the end"
    )
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.only or options.exclude:
        only = options.only.split(",") if options.only else None
        try:
            mcore_megatron.install(
                only, (options.exclude or "").split(",") if options.exclude else ()
            )
        except ValueError as error:
            parser.error(str(error))
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    try:
        runpy.run_path(options.script, run_name="__main__")
    finally:
        if options.report:
            print("\n".join(format_report(mcore_megatron.report())))


if __name__ == "__main__":
    main()
